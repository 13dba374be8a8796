"""`loraplex advise`: advice with its flag first, the rest in tables, JSON as the API has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from loraplex.cli import advise
from loraplex.cli.app import main
from loraplex.client.connection import Connection
from loraplex.client.location import Location
from loraplex.client.management import Management

FOUND = [
    {
        "rule": "max_loras",
        "subject": "main-1",
        "state": "advice",
        "message": "12 of 200 calls loaded again.",
        "effect": "With 12 slots none does.",
        "flag": "--max-loras 12",
        "evidence": {"calls": 200},
    },
    {"rule": "limits", "subject": "team-x", "state": "fine", "message": "At most 3 %."},
    {"rule": "max_model_len", "subject": "tiny", "state": "not_enough", "message": "Not enough to say: 3."},
]


def run(monkeypatch: pytest.MonkeyPatch, found: list[dict[str, object]], *argv: str) -> httpx.Request:
    """Run the command against an API that answers this, and return what it asked."""
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json={"data": found, "next_cursor": None})

    @contextmanager
    def open_fake() -> Iterator[Management]:
        with Connection(Location("http://gateway", "lpx_key"), httpx.MockTransport(answer)) as connection:
            yield Management(connection)

    monkeypatch.setattr(advise, "open_management", open_fake)
    assert main(["advise", *argv]) == 0
    return sent[0]


def test_advice_is_told_with_effect_and_flag_and_the_rest_after_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = run(monkeypatch, FOUND, "--tenant", "team-x")
    assert (request.url.path, dict(request.url.params)) == ("/api/v1/advice", {"tenant": "team-x"})
    text = capsys.readouterr().out
    parts = ["max_loras: main-1", "12 of 200", "With 12 slots", "-> --max-loras 12", "Nothing to do", "At most 3 %"]
    places = [text.index(part) for part in [*parts, "Not enough traffic to say", "Not enough to say: 3."]]
    assert places == sorted(places)


def test_json_is_what_the_api_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, FOUND, "--json")
    told = json.loads(capsys.readouterr().out)
    assert [one["flag"] for one in told] == ["--max-loras 12", "", ""]
    assert told[0]["evidence"] == {"calls": 200}


def test_without_advice_that_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, [])
    assert "nothing to advise" in capsys.readouterr().err
