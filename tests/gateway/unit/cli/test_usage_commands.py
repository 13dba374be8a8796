"""Usage and audit as the commands ask for them and show them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from loraplex.cli import audit, usage
from loraplex.cli.app import main
from loraplex.client.connection import Connection
from loraplex.client.location import Location
from loraplex.client.management import Management

Serve = Callable[[Any], list[httpx.Request]]
ZERO = {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0, "load_bytes": 0}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Answer everything with one body, and return what was asked."""

    def start(body: Any) -> list[httpx.Request]:
        sent: list[httpx.Request] = []

        def answer(request: httpx.Request) -> httpx.Response:
            sent.append(request)
            return httpx.Response(200, json=body)

        @contextmanager
        def open_fake() -> Iterator[Management]:
            with Connection(Location("http://gateway", "lpx_key"), httpx.MockTransport(answer)) as connection:
                yield Management(connection)

        for module in (usage, audit):
            monkeypatch.setattr(module, "open_management", open_fake)
        return sent

    return start


def test_sums_are_printed_as_csv_with_all_columns(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"requests": 2, "decode_s": 1.5, "key": "key_1"}, {"requests": 1, "decode_s": 0.0, "key": "key_2"}]
    (request,) = _ask(serve, {"data": rows, "next_cursor": None}, "usage", "--group-by", "key", "--csv")
    assert request.url.params["group_by"] == "key"
    assert capsys.readouterr().out == "key,requests,decode_s\nkey_1,2,1.5\nkey_2,1,0.0\n"


def test_csv_of_nothing_has_its_heading(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    _ask(serve, {"data": [], "next_cursor": None}, "usage", "--group-by", "tenant,day", "--csv")
    assert capsys.readouterr().out == "tenant,day\n"


def test_text_of_clients_is_never_a_formula(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"request_id": "req_1", "client_request_id": '=HYPERLINK("x")', "tags": {"a": "+1,\n"}, "digest": None}
    (request,) = _ask(serve, {"data": [row]}, "usage", "requests", "--csv", "--limit", "0", "--outcome", "ok")
    assert dict(request.url.params) == {"outcome": "ok"}
    _, cells = csv.reader(io.StringIO(capsys.readouterr().out))
    assert cells == ["req_1", '\'=HYPERLINK("x")', '{"a":"+1,\\n"}', ""]


def test_rows_are_listed_by_what_they_cost(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"request_id": "req_1", "model": "team-x", "outcome": "lost", "prompt_tokens": 7, "completion_tokens": 3}
    (request,) = _ask(serve, {"data": [row]}, "usage", "requests", "--key", "key_1", "--from", "2027-01-01")
    assert dict(request.url.params) == {"limit": "50", "key": "key_1", "from": "2027-01-01"}
    assert capsys.readouterr().out.splitlines()[-1].split() == ["-", "req_1", "team-x", "lost", "7", "-", "3"]
    assert main(["usage", "requests", "--limit", "-1"]) == 1


def test_usage_that_is_what_engines_counted_ends_well(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    same = ZERO | {"requests": 1200, "completion_tokens": 5}
    engine = {"replica": "main-1", "is_exact": True, "engine": same, "usage": same}
    serve({"data": [engine], "is_exact": True})
    assert main(["usage", "reconcile"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[2].split() == ["-", "main-1", "requests", "1,200", "1,200", "0", "0"]
    assert "is what the engines counted" in shown.err


def test_a_difference_is_printed_and_ends_with_1(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    more = ZERO | {"requests": 3, "completion_tokens": 9}
    mismatch = {"request_id": "req_7", "engine": ZERO | {"completion_tokens": 9}, "usage": None}
    engines = [
        {"replica": "main-1", "is_exact": False, "difference": more, "lost": 2, "mismatches": [mismatch]},
        {"replica": "main-2", "is_exact": False, "problem": "it does not answer"},
    ]
    serve({"data": engines, "is_exact": False})
    assert main(["usage", "reconcile"]) == 1
    shown = capsys.readouterr()
    assert [line.split()[-1] for line in shown.out.splitlines()[2:]] == ["3", "0", "0", "9", "0"]
    assert "main-1: 2 requests were settled without the engine's word" in shown.err
    assert (
        "req_7: engine: 0 prompt tokens, 0 cached tokens, 9 completion tokens, 0 load bytes; usage: unknown"
        in " ".join(shown.err.split())
    )
    assert "main-2: it does not answer" in shown.err
    assert main(["usage", "reconcile", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["data"][0]["difference"]["requests"] == 3


def test_the_digest_of_a_request_is_printed_whole(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    digest = "sha256:" + "ab" * 32
    details = {"digest": digest, "base": "b", "model": "m" * 100, "outcome": "ok"}
    event = {"id": "req_1", "at": "2027-01-31T00:00:00Z", "action": "request.answered", "details": details}
    (request,) = _ask(serve, {"data": [event]}, "audit", "--request", "req_1")
    assert request.url.params["request_id"] == "req_1"
    assert digest in "".join(capsys.readouterr().out.split())


def _ask(serve: Serve, body: Any, *arguments: str) -> list[httpx.Request]:
    sent = serve(body)
    assert main(list(arguments)) == 0
    return sent
