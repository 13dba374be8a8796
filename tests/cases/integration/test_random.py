"""Random requests of all features, good and odd, at a real engine and through the gateway; long in `make endure`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from answer_reader import Answer, read_stream, read_whole
from fuzz_run import FuzzReport, run_fuzz
from odd_requests import Odd, OddMix
from openai_world import ADAPTER, BASE, OpenAIWorld
from platforms import wait_for
from random_requests import Drawn, RequestMix

VOCAB_SIZE = 331
Long = Callable[[float, float], float]
PARTS = ["engine", "gateway"]


class Part:
    """The engine's own port, or the gateway's."""

    def __init__(self, world: OpenAIWorld, name: str) -> None:
        self.world, self.is_gateway = world, name == "gateway"
        self.url = world.platform.url if self.is_gateway else world.engine_url
        self.models = [BASE, ADAPTER if self.is_gateway else world.digest]

    def authorize(self) -> str:
        return f"Bearer {self.world.key if self.is_gateway else self.world.sign()}"

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.world.http.post(self.url + path, json=body, headers={"authorization": self.authorize()})

    def mix(self, seed: int) -> RequestMix:
        return RequestMix(seed, self.models, VOCAB_SIZE)


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest, world: OpenAIWorld) -> Part:
    return Part(world, request.param)


def is_idle(world: OpenAIWorld) -> bool:
    state = world.platform.engine_state()
    pins = sum(slot["pins"] for slot in state["slots"])
    is_free = state["kv"]["num_free"] == state["kv"]["num_blocks"]
    return is_free and state["running"] + state["waiting"] + state["open_requests"] + pins == 0


def ask_both_ways(part: Part, drawn: Drawn) -> tuple[Answer, Answer] | str:
    """The whole answer and the streamed one, or the field for which both were refused."""
    path, body = drawn
    whole = part.post(path, body)
    streamed = part.post(path, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert whole.status_code == streamed.status_code, (whole.text, streamed.text, drawn)
    if whole.status_code != 200:
        assert whole.json()["error"] == streamed.json()["error"], drawn
        assert whole.status_code == 400, (whole.text, drawn)
        return str(whole.json()["error"]["param"])
    return read_whole(whole.content), read_stream(streamed.content)


@pytest.mark.endure
def test_streamed_and_whole_answers_to_random_requests_are_equal(part: Part, long: Long) -> None:
    mix = part.mix(5)
    count = int(long(30, 500))
    drawn = [mix.draw() for _ in range(count)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda one: ask_both_ways(part, one), drawn))
    refused = [(result, one) for result, one in zip(results, drawn, strict=True) if isinstance(result, str)]
    answered = [(result, one) for result, one in zip(results, drawn, strict=True) if not isinstance(result, str)]
    unequal = [(result, one) for result, one in answered if result[0] != result[1]]
    assert not unequal, (len(unequal), unequal[:3])
    print(f"{count - len(refused)} of {count} equal; refused for {sorted({field for field, _ in refused})}")
    assert len(refused) < count / 2, refused
    wait_for(lambda: is_idle(part.world))


@pytest.mark.endure
def test_odd_requests_break_nothing(part: Part, long: Long) -> None:
    probe = {"model": BASE, "prompt": "Where is my parcel?", "temperature": 0, "max_tokens": 12}
    before = part.post("/v1/completions", probe).json()["choices"]
    assert is_idle(part.world)
    url = urlsplit(part.url)
    assert url.hostname
    assert url.port
    odds = _draw_odds(part, seed=11)
    started = time.monotonic()
    report: FuzzReport = asyncio.run(run_fuzz((url.hostname, url.port), odds, int(long(150, 20_000))))
    print(f"{report.describe()} in {time.monotonic() - started:.0f} s")
    assert not report.faults, "\n".join([f"{len(report.faults)} faults", *report.faults[:20]])
    wait_for(lambda: is_idle(part.world))
    assert part.post("/v1/completions", probe).json()["choices"] == before


def _draw_odds(part: Part, seed: int) -> Iterator[Odd]:
    mix = OddMix(seed, part.mix(seed), part.authorize)
    while True:
        yield mix.draw()
