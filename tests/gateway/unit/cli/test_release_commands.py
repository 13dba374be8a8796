"""Aliases, canaries, limits and reports as the commands send and show them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from rich.console import Console

from loraplex.cli import adapter_alias, adapter_canary, adapter_limit, adapters, audit, keys, tenants
from loraplex.cli.adapter_alias import share_out
from loraplex.cli.app import main
from loraplex.cli.limit_flag import read_limits
from loraplex.cli.report import print_report
from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError
from loraplex.client.location import Location
from loraplex.client.management import Management
from loraplex_registry.peft.parity import ParityResult
from loraplex_registry.peft.report import Check, build_report
from loraplex_registry.wire.adapter import Target

ALIAS = "/api/v1/tenants/team-x/adapters/bot/aliases"


class Gateway:
    """Answers by a table and remembers what was sent."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.sent: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(request)
        found = self.answers[f"{request.method} {request.url.path}"]
        return found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)


Serve = Callable[..., Gateway]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    def start(**answers: Any) -> Gateway:
        gateway = Gateway({name.replace("_", " ", 1): answer for name, answer in answers.items()})

        @contextmanager
        def open_fake() -> Iterator[Management]:
            with Connection(Location("http://gateway", "lpx_key"), httpx.MockTransport(gateway)) as connection:
                yield Management(connection)

        for module in (adapter_alias, adapter_canary, adapter_limit, adapters, audit, keys, tenants):
            monkeypatch.setattr(module, "open_management", open_fake)
        return gateway

    return start


def live(*targets: tuple[int, int], revision: int = 7) -> dict[str, Any]:
    shares = [{"version": version, "weight": weight} for version, weight in targets]
    return {"alias": "live", "targets": shares, "revision": revision}


def shares(text: str) -> list[Target]:
    return [Target(*map(int, part.split("="))) for part in text.split()]


@pytest.mark.parametrize(
    ("before", "number", "share", "after"),
    [
        ("3=100", 4, 10, "3=90 4=10"),
        ("3=90 4=10", 4, 20, "3=80 4=20"),
        ("3=90 4=10", 4, 0, "3=100"),
        ("3=90 4=10", 4, 100, "4=100"),
        ("3=90 4=10", 3, 50, "3=50 4=50"),
        ("5=100", 2, 1, "2=1 5=99"),
    ],
)
def test_canary_gives_the_rest_to_the_other_version(before: str, number: int, share: int, after: str) -> None:
    assert share_out(shares(before), number, share) == shares(after)


@pytest.mark.parametrize(("before", "number"), [("3=100", 3), ("1=50 2=25 3=25", 4)])
def test_canary_without_one_other_version_is_refused(before: str, number: int) -> None:
    with pytest.raises(ClientError):
        share_out(shares(before), number, 10)


def test_canary_moves_what_it_has_seen(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{ALIAS}/live"
    gateway = serve(**{f"GET_{path}": live((3, 100)), f"PUT_{path}": live((3, 90), (4, 10), revision=8)})
    assert main(["adapters", "canary", "team-x/bot@4", "--share", "10"]) == 0
    put = gateway.sent[-1]
    assert put.headers["if-match"] == '"7"'
    assert json.loads(put.content)["targets"] == live((3, 90), (4, 10))["targets"]
    assert "3 (90 %), 4 (10 %)" in capsys.readouterr().err


def test_alias_is_moved_created_shown_and_deleted(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{ALIAS}/blue"
    gateway = serve(
        **{f"PUT_{path}": live((3, 60), (4, 40)), f"GET_{ALIAS}": {"data": [live((3, 100))], "next_cursor": None}},
        **{f"DELETE_{path}": httpx.Response(204)},
    )
    arguments = ["adapters", "alias", "team-x/bot@blue", "--to", "3=60", "--to", "4=40"]
    assert main([*arguments, "--revision", "2"]) == 0
    assert gateway.sent[-1].headers["if-match"] == '"2"'
    assert main([*arguments, "--revision", "0"]) == 0
    assert gateway.sent[-1].headers["if-none-match"] == "*"
    assert main(["adapters", "alias", "team-x/bot"]) == 0
    assert "live" in capsys.readouterr().out
    assert main(["adapters", "alias", "team-x/bot@blue", "--delete", "--yes"]) == 0
    assert gateway.sent[-1].method == "DELETE"


@pytest.mark.parametrize("is_new", [False, True])
def test_what_was_not_there_before_has_no_way_back(
    serve: Serve, capsys: pytest.CaptureFixture[str], is_new: bool
) -> None:
    status = 201 if is_new else 200
    none = httpx.Response(404, json={"error": {"message": "none", "code": "not_found"}})
    there = httpx.Response(200, json=live((3, 100)), headers={"etag": '"7"'})
    found = none if is_new else there
    answers: dict[str, Any] = {}
    for alias in ("live", "blue"):
        answers |= {f"GET_{ALIAS}/{alias}": found, f"PUT_{ALIAS}/{alias}": httpx.Response(status, json=live((4, 100)))}
    serve(**answers)
    assert main(["adapters", "promote", "team-x/bot@4"]) == 0
    assert main(["adapters", "alias", "team-x/bot@blue", "--to", "4"]) == 0
    shown = capsys.readouterr().err
    assert shown.count("rollback") == (0 if is_new else 2)
    assert ("alias team-x/bot@blue --delete" in shown) is is_new


def test_what_leads_where_it_led_before_has_no_way_back(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    same = httpx.Response(200, json=live((3, 100)), headers={"etag": '"7"'})
    serve(**{f"{verb}_{ALIAS}/live": same for verb in ("GET", "PUT")})
    assert main(["adapters", "promote", "team-x/bot@3"]) == 0
    assert main(["adapters", "alias", "team-x/bot@live", "--to", "3"]) == 0
    assert main(["adapters", "canary", "team-x/bot@3", "--share", "100"]) == 0
    assert "rollback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["alias", "team-x/bot@live", "--to", "3=60", "--to", "4=30"],
        ["alias", "team-x/bot@live", "--to", "3", "--to", "4"],
        ["alias", "team-x/bot@live", "--to", "0=100"],
        ["alias", "team-x/bot@live", "--to", "3", "--delete"],
        ["alias", "team-x/bot", "--to", "3"],
        ["alias", "team-x/bot@3"],
        ["canary", "team-x/bot@4", "--share", "101"],
        ["canary", "team-x/bot@live", "--share", "10"],
        ["rollback", "team-x/bot@3"],
        ["history", "team-x/bot@sha256:aaaaaaaaaaaa"],
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_sent(serve: Serve, arguments: list[str]) -> None:
    gateway = serve()
    assert main(["adapters", *arguments]) == 1
    assert gateway.sent == []


def test_outcomes_are_summed_by_version(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"minute": f"2027-01-31T10:0{i}:00Z", "version": version, "requests": 10, "ok": 8, "error": 1, "cancelled": 1}
        for i, version in ((1, 4), (1, 3), (0, 4))
    ]
    gateway = serve(**{"GET_/api/v1/tenants/team-x/adapters/bot/outcomes": {"data": rows, "next_cursor": None}})
    assert main(["adapters", "outcomes", "team-x/bot", "--from", "2027-01-31T10:00:00Z"]) == 0
    assert gateway.sent[-1].url.params["from"] == "2027-01-31T10:00:00Z"
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["4", "20", "16", "2", "2", "0", "10.0", "%"]
    assert lines[3].split()[0] == "3"


def test_warming_names_the_engines_that_did_not(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    replicas = [{"replica": "a", "state": "resident"}, {"replica": "b", "problem": "It is full"}]
    path = "/api/v1/tenants/team-x/adapters/bot/versions/4/warm"
    serve(**{f"POST_{path}": {"replicas": replicas}})
    assert main(["adapters", "warm", "team-x/bot@4"]) == 1
    shown = capsys.readouterr().err
    assert "b: It is full" in shown
    assert "1 of 2 engines" in shown
    serve(**{f"POST_{path}": {"replicas": replicas[:1]}})
    assert main(["adapters", "warm", "team-x/bot@4"]) == 0


def test_audit_asks_for_what_it_was_told_and_no_more_than_the_limit(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {"id": "evt_1", "at": "2027-01-31T10:00:05Z", "action": "adapter.promoted", "details": {"before": 3}}
    gateway = serve(**{"GET_/api/v1/audit": {"data": [event] * 200, "next_cursor": "more"}})
    assert main(["audit", "--actor", "ada", "--key-id", "key_1", "--limit", "400", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 400
    assert [request.url.params["limit"] for request in gateway.sent] == ["200", "200"]
    assert dict(gateway.sent[0].url.params) == {"actor": "ada", "key_id": "key_1", "limit": "200"}
    assert main(["audit"]) == 0
    assert '{"before": 3}' in capsys.readouterr().out


def test_limits_of_a_tenant_are_numbers_with_or_without_a_unit(serve: Serve) -> None:
    assert read_limits(["adapter_bytes=10GiB", "adapter_rank=none"]) == {
        "adapter_bytes": 10 << 30,
        "adapter_rank": None,
    }
    for text in ("adapter_bytes", "adapter_bytes=-1", "adapter_bytes=1.5GiB", "adapter_bytes=1GB", "=3"):
        with pytest.raises(ClientError, match="NAME=NUMBER"):
            read_limits([text])
    gateway = serve(**{"PATCH_/api/v1/tenants/team-x": {"name": "team-x"}})
    assert main(["tenants", "update", "team-x", "--limit", "adapter_versions=5"]) == 0
    assert json.loads(gateway.sent[-1].content) == {"limits": {"adapter_versions": 5}}


def test_limits_weights_and_priorities_are_sent_as_they_are_said(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    key = {"id": "key_2", "name": "app", "key": "lpx_new", "limits": {"tokens_per_day": 5}, "priority": 2}
    gateway = serve(
        **{
            "PATCH_/api/v1/tenants/team-x": {"name": "team-x"},
            "POST_/api/v1/tenants/team-x/keys": key,
            "PATCH_/api/v1/tenants/team-x/keys/key_2": key,
            "GET_/api/v1/tenants/team-x/keys": {"data": [key], "next_cursor": None},
        }
    )
    assert main(["tenants", "update", "team-x", "--weight", "3", "--limit", "concurrent_requests=none"]) == 0
    assert json.loads(gateway.sent[-1].content) == {"limits": {"concurrent_requests": None}, "weight": 3}
    limit = ["--limit", "tokens_per_day=5"]
    assert main(["keys", "create", "team-x", "--name", "app", *limit, "--priority", "2"]) == 0
    assert json.loads(gateway.sent[-1].content) == {"name": "app", "limits": {"tokens_per_day": 5}, "priority": 2}
    assert capsys.readouterr().out == "lpx_new\n"
    assert main(["keys", "update", "team-x", "key_2", "--priority", "-1"]) == 0
    assert json.loads(gateway.sent[-1].content) == {"priority": -1}
    assert main(["keys", "list", "team-x"]) == 0
    assert "tokens_per_day=5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rights", "shown"),
    [
        ({"role": "admin", "scopes": []}, "role: admin"),
        ({"scopes": ["infer", "usage:read"]}, "scopes: infer, usage:read"),
    ],
)
def test_a_new_key_is_shown_with_what_it_may_do(
    serve: Serve, capsys: pytest.CaptureFixture[str], rights: dict[str, Any], shown: str
) -> None:
    key = {"id": "key_2", "name": "app", "key": "lpx_new", **rights}
    serve(**{f"POST_/api/v1/tenants/ops/keys{path}": key for path in ("", "/key_1/rotate")})
    assert main(["keys", "create", "ops", "--name", "app"]) == 0
    assert main(["keys", "rotate", "ops", "key_1"]) == 0
    assert capsys.readouterr().err.count(f"Key key_2 of ops, {shown}") == 2


def test_rotate_prints_the_new_key_alone(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    gateway = serve(
        **{"POST_/api/v1/tenants/team-x/keys/key_1/rotate": {"id": "key_2", "name": "app", "key": "lpx_new"}}
    )
    assert main(["keys", "rotate", "team-x", "key_1", "--overlap-s", "0"]) == 0
    assert json.loads(gateway.sent[-1].content) == {"overlap_s": 0}
    printed = capsys.readouterr()
    assert printed.out == "lpx_new\n"
    assert "key_2 of team-x, scopes: -, replaces key_1" in printed.err
    assert main(["keys", "rotate", "team-x", "key_1", "--json"]) == 0
    assert json.loads(gateway.sent[-1].content) == {}
    assert json.loads(capsys.readouterr().out)["key"] == "lpx_new"


def test_limits_of_an_adapter_are_shown_or_set(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = {"tenant": "team-x", "name": "support", "is_default": True, "limits": {"tokens_per_day": 5}}
    gateway = serve(
        **{
            "GET_/api/v1/tenants/team-x/adapters": {"data": [adapter], "next_cursor": None},
            "GET_/api/v1/tenants/team-x/adapters/support": adapter,
            "PATCH_/api/v1/tenants/team-x/adapters/support": adapter,
        }
    )
    assert main(["adapters", "limit", "team-x"]) == 0
    assert "tokens_per_day=5" in capsys.readouterr().out
    assert main(["adapters", "limit", "team-x/support", "--limit", "tokens_per_day=none"]) == 0
    assert json.loads(gateway.sent[-1].content) == {"limits": {"tokens_per_day": None}}
    assert main(["adapters", "limit", "team-x/support@2"]) != 0


def test_report_shows_what_an_engine_measured() -> None:
    result = ParityResult(
        dtype="bfloat16",
        num_prompts=4,
        num_positions=150,
        max_logit_difference=0.123456,
        max_kl=0.00012,
        base_logit_difference=0.1,
        base_kl=0.0001,
        logit_limit=0.5,
        kl_limit=0.01,
    )
    report = build_report(()).with_parity(Check("parity", "pass"), result)
    console = Console(width=200)
    with console.capture() as capture:
        print_report(console, report)
    assert "logits differ by 0.123 (limit 0.5, the base alone 0.1); KL 0.00012" in capture.get()
    assert "bfloat16, 150 positions of 4 prompts" in capture.get()


def test_report_says_the_cause_first_and_counts_checks_by_name() -> None:
    checks = [
        Check("format", "pass"),
        Check("target_modules", "warn", "The base has no module gate_up_proj.", "target_modules"),
        Check("unmatched_tensors", "fail", "v_proj in layers 0-29 (60 tensors): not targeted.", "a"),
        Check("unmatched_tensors", "fail", "k_proj in layers 0-29 (60 tensors): not targeted.", "b"),
    ]
    console = Console(width=200)
    with console.capture() as capture:
        print_report(console, build_report(checks))
    shown = capture.get()
    assert shown.index("gate_up_proj") < shown.index("v_proj in layers") < shown.index("k_proj in layers")
    assert "1 of 3 checks passed; verdict: fail" in shown


@pytest.mark.parametrize(
    ("live", "live_state", "latest_state", "shown"),
    [
        (None, None, "quarantined", "quarantined"),
        (None, None, "ready", "-"),
        (1, "ready", "quarantined", "1 (2 quarantined)"),
        (1, "quarantined", "ready", "1, quarantined"),
        (1, "ready", None, "1"),
    ],
)
def test_list_shows_what_is_quarantined(
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
    live: int | None,
    live_state: str | None,
    latest_state: str | None,
    shown: str,
) -> None:
    facts = {"live": live, "live_state": live_state, "latest": 2, "latest_state": latest_state}
    adapter = {"tenant": "team-x", "name": "bot", "created_at": "2027-01-01T00:00:00Z"} | facts
    serve(**{"GET_/api/v1/tenants/team-x/adapters": {"data": [adapter], "next_cursor": None}})
    adapters.list_("team-x")
    row = next(line for line in capsys.readouterr().out.splitlines() if "team-x/bot" in line)
    assert f" {shown} " in row
