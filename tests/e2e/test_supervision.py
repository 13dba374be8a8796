"""A part that dies comes back; a supervisor that dies leaves nothing behind. With a platform of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import openai

from platforms import LivePlatform, running_platform

QUESTION = [{"role": "user", "content": "Hello!"}]


def list_children(pid: int) -> list[int]:
    """All processes below `pid`."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found] + [below for child in found for below in list_children(int(child))]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def can_answer(platform: LivePlatform) -> bool:
    try:
        platform.openai().chat.completions.create(model="smollm2-135m", messages=QUESTION, max_tokens=1)
    except openai.APIStatusError as error:
        if error.status_code not in (502, 503):
            raise
        return False
    return True


def test_killed_engine_comes_back_and_a_killed_supervisor_takes_all_along(smollm2_base: Path, tmp_path: Path) -> None:
    with running_platform(tmp_path / "data", "--max-model-len", "256", exit_code=-signal.SIGKILL) as platform:
        (engine,) = (pid for pid in list_children(platform.process.pid) if "loraplex_engine serve" in command_of(pid))
        below = list_children(engine)
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: not any(map(is_running, below)), 10)
        wait_for(lambda: can_answer(platform), 120)
        everything = list_children(platform.process.pid)
        assert len(everything) >= 3
        platform.process.kill()
        wait_for(lambda: not any(map(is_running, everything)), 10)
