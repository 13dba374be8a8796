"""Cases about more calls than an engine takes: a platform whose queue has four places, and one long answer in front."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from loraplex_engine.bases.pull import pull
from platforms import LivePlatform, running_platform
from support import tiny_llama_config, write_base

BASE = "tiny-queue"
NUM_PLACES = 4
_LONG = 15_000


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePlatform]:
    folder = tmp_path_factory.mktemp("overload")
    source = write_base(folder / BASE, tiny_llama_config(max_position_embeddings=2 * _LONG))
    flags = ["--base", str(pull(str(source), folder / "bases")), "--dtype", "float32", "--cpu-threads", "1"]
    flags += ["--max-num-seqs", "1", "--max-queued-requests", str(NUM_PLACES)]
    with running_platform(folder / "data", *flags) as running:
        yield running


class Crowd:
    """Callers of one platform, whose engine is busy with the first of them."""

    def __init__(self, platform: LivePlatform, http: httpx.AsyncClient) -> None:
        self.platform = platform
        self._http = http

    async def ask(self, **more: Any) -> httpx.Response:
        headers = more.pop("headers", {})
        body = {"model": BASE, "prompt": "Next.", "max_tokens": 4, "ignore_eos": True, **more}
        return await self._http.post("/v1/completions", json=body, headers=headers)

    async def wait_for_queue(self, length: int) -> None:
        deadline = time.monotonic() + 60
        while self.platform.engine_state()["waiting"] != length:
            assert time.monotonic() < deadline, self.platform.engine_state()["waiting"]
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """Keep the engine busy with an answer that does not end."""
        body = {"model": BASE, "prompt": "Go on.", "max_tokens": _LONG, "ignore_eos": True, "stream": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            parts = answer.aiter_bytes()
            await anext(parts)
            yield
            await parts.aclose()
        await self.wait_for_queue(0)


@pytest.fixture
async def crowd(platform: LivePlatform) -> AsyncIterator[Crowd]:
    headers = {"authorization": f"Bearer {platform.admin_key}"}
    async with httpx.AsyncClient(base_url=platform.url, timeout=60, trust_env=False, headers=headers) as http:
        yield Crowd(platform, http)


async def test_b119_more_calls_than_places_are_told_so_at_once(crowd: Crowd) -> None:
    async with crowd.busy():
        waiting = [asyncio.create_task(crowd.ask()) for _ in range(NUM_PLACES)]
        await crowd.wait_for_queue(NUM_PLACES)
        begun = time.monotonic()
        refused = await asyncio.gather(*(crowd.ask() for _ in range(16)))
        assert time.monotonic() - begun < 30
        assert {answer.status_code for answer in refused} == {429}
        assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full"}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        # who leaves is taken out of the queue, and others get the places
        for task in waiting[:3]:
            task.cancel()
        await crowd.wait_for_queue(1)
        waiting += [asyncio.create_task(crowd.ask()) for _ in range(3)]
        await crowd.wait_for_queue(NUM_PLACES)
        assert (await crowd.ask()).status_code == 429
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers[:3]] == [True] * 3
    finished = [answer for answer in answers[3:] if isinstance(answer, httpx.Response)]
    assert [answer.json()["usage"]["completion_tokens"] for answer in finished] == [4] * NUM_PLACES


async def test_b119_who_has_no_time_left_is_taken_out_of_the_queue(crowd: Crowd) -> None:
    async with crowd.busy():
        begun = time.monotonic()
        late = await asyncio.gather(*(crowd.ask(headers={"x-request-timeout": "0.4"}) for _ in range(NUM_PLACES)))
        assert time.monotonic() - begun < 30
        codes = {(answer.status_code, answer.json()["error"]["code"]) for answer in late}
        # the gateway's clock and the engine's run side by side
        assert codes <= {(504, "deadline_exceeded"), (429, "queue_full")}
        await crowd.wait_for_queue(0)
