"""Pages of escalations: evidence and figures as text, four eyes, verbs for those who may."""

from __future__ import annotations

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
