"""What comes before a generation starts: bounded by the deadline, ended with its client, and sure to come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from byte_client import LEAVES, build_request, connected
from loraplex_engine.server.template import Template
from loraplex_engine.server.thread import run_in_thread
from scripted_core import BASE, Rig, running_rig, sign, until
from toy_tokenizers import write_byte_level

CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
CHAT_PATH = "/v1/chat/completions"


class Stuck:
    """Renders for ever."""

    def __init__(self) -> None:
        self.num_begun = self.num_ended = 0

    async def render(self, *_: object, **__: object) -> NoReturn:
        self.num_begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_ended += 1
        raise AssertionError


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Stuck:
    stuck = Stuck()
    monkeypatch.setattr(Template, "render", stuck.render)
    return stuck


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base")) as running:
        yield running


@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/tokenize"])
async def test_a_prompt_that_takes_longer_than_the_deadline_is_given_up(rig: Rig, stuck: Stuck, path: str) -> None:
    answer = await asyncio.wait_for(rig.post(path, CHAT, x_loraplex_deadline_ms="100"), 60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    await until(lambda: stuck.num_ended == 1)
    assert (rig.core.added, rig.front.log.num_open) == ([], 0)


@pytest.mark.parametrize("how", LEAVES)
async def test_a_prompt_whose_client_goes_is_given_up(rig: Rig, stuck: Stuck, how: str) -> None:
    async with connected(rig.uds) as client:
        await client.send(build_request(CHAT_PATH, json.dumps(CHAT).encode(), {"authorization": f"Bearer {sign()}"}))
        await until(lambda: stuck.num_begun == 1)
        client.leave(how)
        await until(lambda: stuck.num_ended == 1, 10)
    assert (rig.core.added, rig.front.log.num_open) == ([], 0)


async def test_a_thread_that_ends_with_stop_iteration_is_told() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(run_in_thread(lambda: next(iter(()))), 30)


def test_all_work_in_threads_of_the_front_goes_one_way() -> None:
    folder = Path(__file__).parents[3] / "engine/loraplex_engine/server"
    found = {
        path.name
        for path in folder.rglob("*.py")
        if any(name in path.read_text(encoding="utf-8") for name in ("to_thread(", "run_in_executor("))
    }
    assert found == {"thread.py"}
