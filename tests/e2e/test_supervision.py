"""A part that dies comes back; a supervisor that dies leaves nothing behind. With a platform of its own."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai

from platforms import LivePlatform, command_of, create_team, list_children, running_platform, wait_for
from server_process import is_running

FLAGS = ("--dtype", "float32", "--max-model-len", "256")
QUESTION: Any = [{"role": "user", "content": "What is a library?"}]


def ask(platform: LivePlatform, model: str) -> str | None:
    """The likeliest answer, None while no engine serves."""
    try:
        with platform.openai() as client:
            answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=12, temperature=0)
    except openai.APIStatusError as error:
        if error.status_code not in (502, 503):
            raise
        return None
    return answer.choices[0].message.content


def ask_until_answered(platform: LivePlatform, model: str) -> str:
    """The first answer that comes; nothing else is an answer."""
    found: list[str] = []

    def is_answered() -> bool:
        found.extend(text for text in [ask(platform, model)] if text is not None)
        return bool(found)

    wait_for(is_answered, 120)
    return found[0]


def test_killed_engine_comes_back_with_its_adapters_and_a_killed_supervisor_takes_all_along(
    smollm2_base: Path, tmp_path: Path
) -> None:
    with running_platform(tmp_path / "data", *FLAGS, exit_code=-signal.SIGKILL) as platform:
        models = [create_team(platform, f"team-{style}", style).name for style in ("pirate", "json")]
        right = [ask(platform, model) for model in models]
        assert len({*right, ask(platform, "smollm2-135m")}) == 3
        (engine,) = (pid for pid in list_children(platform.process.pid) if "loraplex_engine serve" in command_of(pid))
        below = list_children(engine)
        os.kill(engine, signal.SIGKILL)
        with ThreadPoolExecutor(len(models)) as pool:
            assert list(pool.map(lambda model: ask_until_answered(platform, model), models)) == right
        assert not any(map(is_running, below))
        everything = list_children(platform.process.pid)
        assert len(everything) >= 3
        platform.process.kill()
        wait_for(lambda: not any(map(is_running, everything)))
