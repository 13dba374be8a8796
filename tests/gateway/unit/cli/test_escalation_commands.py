"""`loraplex escalations`: what it sends, and what it shows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.cli import escalations
from loraplex.cli.app import main
from loraplex.client.connection import Connection
from loraplex.client.location import Location
from loraplex.client.management import Management

ESC = "esc_" + "a" * 26
ONE = f"/api/v1/escalations/{ESC}"
FULL = "sha256:" + "a" * 64
LISTED: dict[str, Any] = {
    "id": ESC, "tenant": "team-x", "adapter": "bot", "version": 4, "base_model": "tiny", "state": "requested",
    "is_overdue": False, "owner": None, "requested_by": "tina", "created_at": "2027-01-01T00:00:00Z", "age_days": 3,
    "expires_at": "2027-01-31T00:00:00Z", "review_at": None, "cost_per_month": 2500.5, "currency": "EUR",
    "verbs": ["approve", "reject", "close"],
}  # fmt: skip
SATURATION = {"rank": 8, "mean_effective_rank": 6.5, "num_saturated": 3, "num_modules": 4}
WHOLE = LISTED | {
    "digest": FULL, "reason": "far away", "approval": None, "full": None,
    "evidence": {
        "evaluation": "e", "data_digest": FULL, "num_samples": 1200, "metric": "exact_match", "base": 0.4, "lora": 0.55,
        "target": 0.7, "ranks_tried": [{"rank": 8, "value": 0.5}],
    },
    "figures": {
        "gap": {"closed": 0.5}, "traffic": {"requests": 7, "share_of_tokens": 0.25}, "saturation": SATURATION,
        "problem": None,
    },
    "history": [
        {"at": "2027-01-01T00:00:00Z", "verb": "open", "from_state": None, "to_state": "requested", "actor": "tina",
         "key_id": "key_1", "request_id": "req_1", "details": {}},
    ],
}  # fmt: skip


class Gateway:
    """Answers by a table and remembers what was sent."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.sent: list[tuple[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.sent.append((f"{request.method} {request.url.path}", body))
        found = self.answers.get(f"{request.method} {request.url.path}", WHOLE)
        return found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)


Serve = Callable[..., Gateway]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    def start(**answers: Any) -> Gateway:
        gateway = Gateway(answers)

        @contextmanager
        def open_fake() -> Iterator[Management]:
            with Connection(Location("http://gateway", "lpx_key"), httpx.MockTransport(gateway)) as connection:
                yield Management(connection)

        monkeypatch.setattr(escalations, "open_management", open_fake)
        return gateway

    return start


def run(*words: str) -> int:
    return main(["escalations", *words])


def test_open_sends_the_evidence_with_the_digest_of_the_data(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = serve()
    (tmp_path / "e.json").write_text(json.dumps({"evaluation": "e"}))
    (tmp_path / "data").write_bytes(b"samples")
    paths = ("--evidence", str(tmp_path / "e.json"), "--data", str(tmp_path / "data"))
    assert run("open", "team-x/bot@4", *paths, "--expires-at", "2027-02-01") == 0
    digest = "sha256:" + hashlib.sha256(b"samples").hexdigest()
    assert gateway.sent == [
        (
            "POST /api/v1/tenants/team-x/escalations",
            {
                "adapter": "bot", "version": 4, "expires_at": "2027-02-01T00:00:00Z",
                "evidence": {"evaluation": "e", "data_digest": digest},
            },
        )
    ]  # fmt: skip
    captured = capsys.readouterr()
    assert f"Escalation {ESC} of team-x/bot is requested." in captured.err
    assert "6.5 of 8 on average; 3 of 4 modules use nearly all of it" in captured.out
    assert "50%" in captured.out


def test_evidence_of_other_data_is_refused(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gateway = serve()
    (tmp_path / "data").write_bytes(b"samples")
    paths = ("--evidence", str(tmp_path / "e.json"), "--data", str(tmp_path / "data"))
    (tmp_path / "e.json").write_text(json.dumps({"data_digest": "sha256:" + "0" * 64}))
    assert run("open", "team-x/bot", *paths) == 1
    assert "the figures are of other data" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "e.json").write_text("[]")
    assert run("open", "team-x/bot", *paths) == 1
    assert gateway.sent == []
    digest = "sha256:" + hashlib.sha256(b"samples").hexdigest()
    (tmp_path / "e.json").write_text(json.dumps({"data_digest": digest}))
    assert run("open", "team-x/bot", *paths) == 0
    assert gateway.sent[0][1]["evidence"] == {"data_digest": digest}


def test_without_an_adapter_the_default_is_meant_and_no_evidence_is_an_error(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = serve()
    (tmp_path / "e.json").write_text(json.dumps({"data_digest": FULL}))
    run("open", "team-x", "--evidence", str(tmp_path / "e.json"))
    assert gateway.sent[0][1]["adapter"] == "default"
    for text in ("[1]", "{", ""):
        (tmp_path / "e.json").write_text(text)
        assert run("open", "team-x", "--evidence", str(tmp_path / "e.json")) == 1
    assert run("open", "team-x", "--evidence", str(tmp_path / "nothing.json")) == 1
    assert "No such file" in capsys.readouterr().err
    assert len(gateway.sent) == 1


@pytest.mark.parametrize(
    ("words", "verb", "body"),
    [
        (
            "approve {} --owner grace --justification x --budget 2500 --review-at 2027-06-30 --on-overdue revert",
            "approve",
            {
                "owner": "grace", "justification": "x", "budget_per_month": 2500.0,
                "review_at": "2027-06-30T00:00:00Z", "on_overdue": "revert",
            },
        ),
        ("reject {} --reason no", "reject", {"reason": "no"}),
        (
            f"register {{}} --pool p --digest {FULL} --cost 9", "register",
            {"pool": "p", "digest": FULL, "cost_per_month": 9},
        ),
        ("activate {} --wait 5", "activate", {"wait_s": 5.0}),
        ("activate {}", "activate", {}),
        ("revert {}", "revert", {}),
        ("extend {} --review-at 2027-06-30", "extend", {"review_at": "2027-06-30T00:00:00Z"}),
        ("close {} --reason done", "close", {"reason": "done"}),
    ],
)  # fmt: skip
def test_verbs_send_what_they_are_told(serve: Serve, words: str, verb: str, body: dict[str, Any]) -> None:
    gateway = serve()
    assert run(*words.format(ESC).split()) == 0
    assert gateway.sent == [(f"POST {ONE}/{verb}", body)]


def test_register_takes_the_digest_that_the_pool_reports(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    def fleet(*digests: str) -> dict[str, Any]:
        engines = [{"pool": "p", "model": "m", "state": {"model": {"digest": digest}}} for digest in digests]
        approved = WHOLE | {"state": "approved", "verbs": ["register", "close"]}
        return {"GET /api/v1/fleet": {"data": [*engines, {"pool": "main", "state": {}}]}, f"GET {ONE}": approved}

    gateway = serve(**fleet(FULL, FULL))
    assert run("register", ESC, "--pool", "p") == 0
    assert gateway.sent[-1] == (f"POST {ONE}/register", {"pool": "p", "digest": FULL})
    for digests in ((FULL, "sha256:" + "b" * 64), ("",)):
        gateway = serve(**fleet(*digests))
        assert run("register", ESC, "--pool", "p") == 1
        assert all(name.startswith("GET") for name, _ in gateway.sent)
        assert "say which with --digest" in capsys.readouterr().err.replace("\n", " ")
    for pool, known, digests in (("typo", "there are p", (FULL,)), ("main", "there is none yet", ())):
        gateway = serve(**fleet(*digests))
        assert run("register", ESC, "--pool", pool) == 1
        assert all(name.startswith("GET") for name, _ in gateway.sent)
        assert f"no pool {pool} of a full model; {known}" in capsys.readouterr().err.replace("\n", " ")


def test_evidence_without_a_digest_says_to_give_the_data(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = serve()
    evidence = tmp_path / "ev.json"
    evidence.write_text('{"evaluation": "e"}')
    assert main(["escalations", "open", "team-x", "--evidence", str(evidence)]) == 1
    assert "give --data FILE" in " ".join(capsys.readouterr().err.split())
    assert gateway.sent == []


@pytest.mark.parametrize(
    ("verbs", "said"),
    [
        (["approve", "close"], "This escalation is requested; what can be done now: approve, close.  [conflict"),
        (["register", "close"], "LORAPLEX_POOLS has no pool nope of a full model; there is none yet.  [not_found"),
    ],
)
def test_register_without_a_pool_complains_of_the_state_first(
    verbs: list[str], said: str, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = serve(**{"GET /api/v1/fleet": {"data": []}, f"GET {ONE}": WHOLE | {"verbs": verbs}})
    assert main(["escalations", "register", ESC, "--pool", "nope"]) == 1
    assert said in capsys.readouterr().err
    assert [name for name, _ in gateway.sent] == ["GET /api/v1/fleet", f"GET {ONE}"]


def test_lists_and_the_report_show_owner_age_and_cost(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    copies = {"teams": 40, "weights_gib": 598.4, "gpus": 8, "gpu": "H100 80 GB"}
    cost = {"currency": "EUR", "num_full": 1, "cost_per_month": 2500.5, "forty_would_cost_per_month": 100020.0}
    report = {
        "data": [LISTED], "num_open": 1, "num_active": 0, "num_overdue": 0, "costs": [cost],
        "forty_full_fine_tunes": copies, "forty_adapters": copies | {"gpus": 1},
    }  # fmt: skip
    serve(**{
        "GET /api/v1/escalations": {"data": [LISTED], "next_cursor": None}, "GET /api/v1/escalations/report": report,
    })  # fmt: skip
    assert run("list", "--state", "requested") == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in (ESC, "team-x/bot", "3 d", "2,500.50 EUR", "tina"))
    assert run("report") == 0
    shown = capsys.readouterr().out
    assert "598.4 GiB of weights of an 8B base on 8 x H100 80 GB" in shown
    assert "100,020.00 EUR" in shown
    assert run("show", ESC) == 0
    assert "far away" in capsys.readouterr().out
    assert run("list", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["id"] == ESC
