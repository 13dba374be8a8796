"""Pages of escalations: evidence and figures as text, four eyes, verbs for those who may."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dashboard_world import Browser, find_unsafe, read_text
from escalation_world import FULL, POOL, EscalationWorld, build_evidence, in_days, running_escalations
from loraplex_registry.peft.saturation_process import SaturationAnswer, SaturationJob, answer_job

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">'


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EscalationWorld]:
    async def measure_here(job: SaturationJob) -> SaturationAnswer:
        return answer_job(job)

    monkeypatch.setattr("loraplex_registry.saturation._run", measure_here)
    async with running_escalations(database_url, tmp_path) as running:
        yield running


async def log_in(world: EscalationWorld, key: str) -> Browser:
    browser = Browser(world.world)
    await browser.log_in(key)
    return browser


def build_form(**changes: str) -> dict[str, str]:
    return {
        "owner": "grace",
        "justification": "Contracts need it.",
        "budget_per_month": "2500.50",
        "currency": "EUR",
        "review_at": in_days(30)[:10],
        "on_overdue": "keep",
    } | changes


async def test_a_team_follows_its_escalation_from_the_question_to_the_end(world: EscalationWorld) -> None:
    opened = await world.open(reason=HOSTILE, evidence=build_evidence(evaluation=HOSTILE, metric=HOSTILE))
    address = f"/ui/escalations/{opened.json()['id']}"
    admin, team = await log_in(world, world.admin), await log_in(world, world.team)
    page = (await team.get(address)).text
    assert find_unsafe(page) == []
    for text in ("50.0 % of the way from base to target", "requested", HOSTILE):
        assert text in read_text(page) or HOSTILE.split("<", maxsplit=1)[0] in text
    assert 'data-open="approve"' not in page
    assert 'data-open="close"' in page
    for verb, fields in (
        ("approve", build_form()),
        ("register", {"pool": POOL, "digest": FULL, "cost_per_month": ""}),
        ("activate", {}),
        ("revert", {"reason": "It was worse."}),
        ("activate", {}),
    ):
        done = await admin.post(f"{address}/{verb}", fields, hx_request="true")
        assert done.status_code == 200, done.text
    assert await world.live() == [(2, 100)]
    closed = await team.post(f"{address}/close", {}, hx_request="true")
    assert closed.status_code == 200, closed.text
    assert await world.live() == [(1, 100)]
    text = read_text((await team.get(address)).text)
    for word in ("closed", "It was worse.", "2,500.50 EUR", "grace"):
        assert word in text


async def test_who_asked_does_not_approve_and_is_told_why(world: EscalationWorld) -> None:
    opened = await world.open()
    address = f"/ui/escalations/{opened.json()['id']}"
    asked_by_ada = await world.world.create_key("staff", role="admin", owner="tina")
    browser = await log_in(world, asked_by_ada)
    assert "asked for this yourself" in read_text((await browser.get(address)).text)
    refused = await browser.post(f"{address}/approve", build_form(), hx_request="true")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
    assert refused.json()["error"]["message"]


async def test_teams_see_their_own_and_move_only_what_the_api_lets_them(world: EscalationWorld) -> None:
    opened = await world.open()
    address = f"/ui/escalations/{opened.json()['id']}"
    other, team = await log_in(world, world.other_team), await log_in(world, world.team)
    assert (await other.get(address)).status_code == 404
    assert "team-x" not in read_text((await other.get("/ui/escalations")).text)
    assert (await other.post(f"{address}/close", {})).status_code == 404
    assert "team-x/default@1" in read_text((await team.get("/ui/escalations")).text)
    assert (await team.post(f"{address}/approve", build_form())).status_code == 403
    assert (await team.post(f"{address}/nonsense", {})).status_code == 404
    assert (await team.get("/ui/escalations/esc_x")).status_code == 404


async def test_the_platform_sees_what_forty_would_cost(world: EscalationWorld) -> None:
    await world.lead_to("registered")
    admin = await log_in(world, world.admin)
    page = await admin.get("/ui/escalations")
    text = read_text(page.text)
    assert find_unsafe(page.text) == []
    for figure in ("2,500.50 EUR", "100,020.00 EUR", "598.4 GiB", "16.0 GiB"):
        assert figure in text
    assert "598.4" not in read_text((await (await log_in(world, world.team)).get("/ui/escalations")).text)


async def test_a_form_that_makes_no_sense_changes_nothing(world: EscalationWorld) -> None:
    opened = await world.open()
    address = f"/ui/escalations/{opened.json()['id']}"
    admin = await log_in(world, world.admin)
    for changes in ({"budget_per_month": "much"}, {"review_at": "soon"}, {"owner": ""}, {"on_overdue": "never"}):
        response = await admin.post(f"{address}/approve", build_form(**changes), hx_request="true")
        assert response.status_code == 400, changes
    assert (await world.show(opened.json()["id"]))["state"] == "requested"


OPEN = "/ui/escalations/open"


def build_opening(**changes: str) -> dict[str, str]:
    """What an administrator fills in, two ranks that were tried; an empty text takes a field out."""
    evidence = build_evidence()
    ranks = evidence.pop("ranks_tried")
    fields = {"tenant": "team-x", "adapter": "default", "reason": "The domain\r\nis far away.", "version": ""}
    fields |= {f"evidence.{name}": str(value) for name, value in evidence.items()}
    for index, tried in enumerate(ranks):
        fields |= {f"evidence.ranks_tried[{index}].{name}": str(value) for name, value in tried.items()}
    return fields | changes


async def test_an_administrator_opens_one_and_the_audit_says_so(world: EscalationWorld) -> None:
    admin = await log_in(world, world.admin)
    assert OPEN in (await admin.get("/ui/escalations")).text
    page = await admin.get(OPEN)
    assert (page.status_code, find_unsafe(page.text)) == (200, [])
    opened = await admin.post(OPEN, build_opening(expires_at=in_days(9)[:10]), hx_request="true")
    assert opened.status_code == 200, opened.text
    address = json.loads(opened.headers["hx-location"])["path"]
    found = await world.show(address.removeprefix("/ui/escalations/"))
    assert (found["state"], found["requested_by"], found["version"]) == ("requested", "grace", 1)
    assert (found["reason"], found["expires_at"][:10]) == ("The domain is far away.", in_days(9)[:10])
    assert found["evidence"] == build_evidence()
    listed = await world.world.call("GET", "/api/v1/audit?action=escalation.opened", key=world.admin)
    (event,) = listed.json()["data"]
    assert (event["actor"], event["subject"]) == ("grace", found["id"])
    assert "grace" in read_text((await admin.get("/ui/audit?action=escalation.opened")).text)
    # who asked does not approve
    refused = await admin.post(f"{address}/approve", build_form(), hx_request="true")
    assert refused.status_code == 403


async def test_an_opening_is_judged_as_the_api_does_and_the_refusal_names_its_field(world: EscalationWorld) -> None:
    cases: list[tuple[dict[str, str], int, str]] = [
        ({"tenant": ""}, 400, "tenant"),
        ({"tenant": "nobody"}, 404, "tenant"),
        ({"adapter": ""}, 400, "adapter"),
        ({"adapter": "nothing"}, 404, "adapter"),
        ({"version": "much"}, 400, "version"),
        ({"version": "7"}, 404, "version"),
        ({"expires_at": "soon"}, 400, "expires_at"),
        ({"expires_at": "2001-01-01"}, 400, "expires_at"),
        ({"evidence.evaluation": ""}, 400, "evidence.evaluation"),
        ({"evidence.data_digest": "sha256:1"}, 400, "evidence.data_digest"),
        ({"evidence.num_samples": "0"}, 400, "evidence.num_samples"),
        ({"evidence.num_samples": "1.5"}, 400, "evidence.num_samples"),
        ({"evidence.base": "much"}, 400, "evidence.base"),
        ({"evidence.base": "nan"}, 400, "evidence.base"),
        ({"evidence.lora": "0.7"}, 400, "evidence.lora"),
        ({"evidence.target": "1e99"}, 400, "evidence.target"),
        ({"evidence.ranks_tried[1].rank": "8"}, 400, "evidence.ranks_tried"),
        ({"evidence.ranks_tried[1].rank": "4097"}, 400, "evidence.ranks_tried[1].rank"),
        ({"evidence.ranks_tried[0].value": ""}, 400, "evidence.ranks_tried[0].value"),
    ]
    admin = await log_in(world, world.admin)
    for changes, status, param in cases:
        refused = await admin.post(OPEN, build_opening(**changes), hx_request="true")
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text
        assert (await world.world.call("GET", "/api/v1/escalations", key=world.admin)).json()["data"] == [], changes


async def test_nobody_else_opens_one_by_a_page(world: EscalationWorld) -> None:
    reader = await world.world.create_key("staff", role="admin_readonly", owner="rita")
    for key in (world.team, reader):
        browser = await log_in(world, key)
        assert OPEN not in (await browser.get("/ui/escalations")).text
        assert (await browser.get(OPEN)).status_code == 403
        assert (await browser.post(OPEN, build_opening(), hx_request="true")).status_code == 403
    admin = await log_in(world, world.admin)
    for headers in ({"origin": "https://elsewhere"}, {"origin": ""}):
        assert (await admin.post(OPEN, build_opening(), **headers)).status_code == 403
    assert (await world.world.call("GET", "/api/v1/escalations", key=world.admin)).json()["data"] == []
