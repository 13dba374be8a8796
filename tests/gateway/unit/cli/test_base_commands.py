"""Making a base known to a platform whose engines run apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.cli.app import main
from loraplex.client.connection import Connection
from loraplex.supervisor.base import PulledBase
from registry_world import build_tiny_spec

SPEC = build_tiny_spec("tiny-base", max_lora_rank=64)
Start = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """A platform that knows some bases, and a cache that has one; returns what is registered."""
    monkeypatch.setenv("LORAPLEX_URL", "http://gateway")
    monkeypatch.setenv("LORAPLEX_API_KEY", "lpx_admin")

    async def pull(spec: str, served_name: str, env: dict[str, str]) -> PulledBase:
        assert (spec, served_name, env["LORAPLEX_URL"]) == ("org/tiny", "", "http://gateway")
        return PulledBase(Path("/cache"), SPEC)

    def begin(*known: dict[str, Any]) -> list[dict[str, Any]]:
        registered: list[dict[str, Any]] = []

        def answer(request: httpx.Request) -> httpx.Response:
            assert (request.url.path, request.headers["authorization"]) == ("/api/v1/bases", "Bearer lpx_admin")
            if request.method == "GET":
                return httpx.Response(200, json={"data": list(known), "next_cursor": None})
            body = json.loads(request.content)
            registered.append(body)
            name = next((one["name"] for one in known if one["fingerprint"] == body["fingerprint"]), body["name"])
            return httpx.Response(201, json={"name": name, "max_lora_rank": body["max_lora_rank"]})

        connect = partial(Connection, transport=httpx.MockTransport(answer))
        monkeypatch.setattr("loraplex.supervisor.base.pull_base", pull)
        for module in ("loraplex.client.connection", "loraplex.supervisor.base"):
            monkeypatch.setattr(f"{module}.Connection", connect)
        return registered

    return begin


def test_a_base_is_told_to_the_platform_with_all_its_facts(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    registered = start()
    assert main(["base", "register", "org/tiny"]) == 0
    assert registered[0]["fingerprint"] == SPEC.fingerprint
    assert registered[0]["modules"].keys() == SPEC.modules.keys()
    assert "tiny-base is known at http://gateway, with adapters up to rank 64." in capsys.readouterr().err
    assert main(["base", "register", "org/tiny", "--max-lora-rank", "128", "--json"]) == 0
    assert registered[1]["max_lora_rank"] == 128
    assert json.loads(capsys.readouterr().out)["max_lora_rank"] == 128


def test_a_known_base_keeps_its_name_and_its_rank_limit(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"name": "other", "fingerprint": "o" * 64, "max_lora_rank": 8}
    registered = start(other, {"name": "first", "fingerprint": SPEC.fingerprint, "max_lora_rank": 32})
    assert main(["base", "register", "org/tiny"]) == 0
    assert registered[0]["max_lora_rank"] == 32
    assert "first (here it is tiny-base) is known" in capsys.readouterr().err


def test_without_a_key_nothing_is_fetched(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    start()
    monkeypatch.delenv("LORAPLEX_API_KEY")
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path))
    assert main(["base", "register", "another"]) == 1
    assert "LORAPLEX_API_KEY" in capsys.readouterr().err
