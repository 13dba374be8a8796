"""The gateway's access log: one line a request with who, what, how long and how many tokens, and no word of prompts."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway_world import ADMIN_KEY, GatewayWorld, running_world, until
from loraplex_registry.wire.log import JsonFormatter

SECRET = "the-word-of-a-prompt"


class Lines(logging.Handler):
    """All lines of the process, as they would be written."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def find(self, request_id: str) -> dict[str, Any]:
        """The access line of a request."""
        shown = [json.loads(line) for line in self.lines]
        (found,) = [one for one in shown if one["logger"] == "loraplex.access" and one["request_id"] == request_id]
        return found


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logging.getLogger().addHandler(handler)
    for name in ("loraplex", "loraplex.access"):
        logging.getLogger(name).setLevel(logging.DEBUG)
    yield handler
    logging.getLogger().removeHandler(handler)
    for name in ("loraplex", "loraplex.access"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path) as running:
        await running.create_tenant("team-x")
        yield running


@pytest.fixture
def dialect() -> str:
    return "sqlite"


async def test_a_generation_is_one_line_with_its_cost_and_not_its_words(world: GatewayWorld, lines: Lines) -> None:
    key = await world.create_key("team-x", owner="dev")
    version = await world.push("team-x")
    answer = await world.complete(
        "team-x", "answer", key, fields={"user": SECRET, "stop": [SECRET]}, headers={"x-request-id": "mine"}
    )
    request_id = answer.headers["x-request-id"]
    await until(lambda: any(request_id in line and "loraplex.access" in line for line in lines.lines))
    found = lines.find(request_id)
    times = {
        name: found.pop(name) for name in ("time", "answered_s", "took_s", "queue_s", "load_s", "prefill_s", "decode_s")
    }
    assert 0 < times["answered_s"] <= times["took_s"] < 30
    key_id = found.pop("key_id")
    assert key_id.startswith("key_")
    assert found == {
        "level": "info",
        "logger": "loraplex.access",
        "message": "POST /v1/completions 200",
        "request_id": request_id,
        "client_request_id": "mine",
        "tenant": "team-x",
        "adapter": "default",
        "version": 1,
        "digest": version["digest"],
        "base": "tiny",
        "replica": answer.headers["x-loraplex-replica"],
        "outcome": "ok",
        "finish": "stop",
        "prompt_tokens": 7,
        "cached_tokens": 2,
        "completion_tokens": 5,
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
    }
    everything = "\n".join(lines.lines)
    assert SECRET not in everything
    assert key not in everything
    assert ADMIN_KEY not in everything


async def test_refusals_say_their_code_and_addresses_are_not_repeated(world: GatewayWorld, lines: Lines) -> None:
    key = await world.create_key("team-x", owner="dev")
    forged = "/v1/x%0a%7B%22level%22%3A%22info%22%7D"
    answers = [
        await world.complete("no-such\n{}", "x", key),
        await world.call("GET", "/v1/models", key="lpx_wrong"),
        await world.call("GET", forged, key=key),
    ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    await until(lambda: sum("loraplex.access" in line and any(one in line for one in ids) for line in lines.lines) == 3)
    shown = [lines.find(one) for one in ids]
    assert [(one["status"], one.get("code")) for one in shown] == [
        (404, "model_not_found"),
        (401, "invalid_api_key"),
        (404, "not_found"),
    ]
    assert shown[2]["route"] == "none"
    assert all(len(line.splitlines()) == 1 for line in lines.lines)
    assert "no-such" not in "".join(map(str, shown))
