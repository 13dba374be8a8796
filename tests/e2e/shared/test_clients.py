"""Clients of other projects, each a short conversation with tools and a schema, at the base and at an adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from platforms import LivePlatform, Team

TESTS = Path(__file__).resolve().parents[2]
BASE = "smollm2-135m"


def converse(client: str, platform: LivePlatform, team: Team, models: list[str]) -> dict[str, Any]:
    """Run a client's script and return what it printed, by model."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LANG", "OPENAI", "LITELLM"))}
    env |= {"OPENAI_API_KEY": team.key, "NO_PROXY": "127.0.0.1"}
    argv = [sys.executable, str(TESTS / f"{client}_client.py"), platform.url, *models]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=480)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("client", [pytest.param("langchain", marks=pytest.mark.endure), "litellm"])
def test_a_conversation_with_a_tool_and_a_schema(
    platform: LivePlatform, teams: dict[str, Team], client: str, long: Callable[[float, float], float]
) -> None:
    if client == "langchain" and not long(0, 1):
        pytest.skip("imports for ten seconds; litellm is asked the same")
    models = ["team-pirate", *([BASE] if long(0, 1) else [])]
    by_model = converse(client, platform, teams["pirate"], models)
    assert len({found["whole"] for found in by_model.values()}) == len(models)
    for found in by_model.values():
        check_conversation(found)
        if client == "litellm":
            assert "no_such_field" in found["refusal"]


def check_conversation(found: dict[str, Any]) -> None:
    assert found["streamed"] == found["whole"] != ""
    assert len(found["streamed_usage"]) == 1
    assert found["verdict"].keys() == {"is_late", "reason"}
    tool = found["tool"]
    [[name, arguments]] = tool["calls"]
    assert name.lower() == "weather"
    assert arguments.keys() == {"city", "days"}
    assert 1 <= arguments["days"] <= 7
    assert tool["streamed"] == tool["calls"]
    assert tool["finish"] == "tool_calls"
    assert tool["answer"] != ""
