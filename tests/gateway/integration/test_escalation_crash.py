"""A gateway that is killed in the middle of a verb: one that lives does what was begun to its end, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from escalation_world import FULL, POOL, EscalationWorld, running_escalations
from gateway_world import until
from loraplex.db.tables import escalation as table
from loraplex_registry.peft.saturation_process import SaturationAnswer, SaturationJob, answer_job
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_public_id

A = "/api/v1/tenants/team-x/adapters/default"
DONE = {"revert": "reverted", "close": "closed", "activate": "activated"}


class KilledError(BaseException):
    """Nothing runs after it."""


@pytest.fixture
async def world(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EscalationWorld]:
    async def measure(job: SaturationJob) -> SaturationAnswer:
        return await asyncio.to_thread(answer_job, job)

    monkeypatch.setattr("loraplex_registry.saturation._run", measure)
    async with running_escalations(database_url, tmp_path) as running:
        yield running


def build_admin(world: EscalationWorld) -> Identity:
    tenant = world.world.gateway.directory.find_tenant("team-x")
    assert tenant is not None
    return Identity(
        role="admin", tenant_id=None, tenant=None, scopes=(), key_id="key_of_grace", actor="grace",
        request_id=new_public_id("req"), target_tenant_id=str(tenant.id), target_tenant="team-x",
    )  # fmt: skip


async def kill(world: EscalationWorld, act: Callable[[Identity], Awaitable[object]], *, at: str) -> Identity:
    """Let the process end at a method of the service or of the registry; return who was at it."""

    async def die(*_: Any, **__: Any) -> None:
        raise KilledError

    by = build_admin(world)
    service = world.world.gateway.escalations
    holder = service if hasattr(service, at) else service._models
    with pytest.MonkeyPatch.context() as dying:
        dying.setattr(holder, at, die)
        dying.setattr("loraplex.escalations.service.give_back", die)
        with pytest.raises(KilledError):
            await act(by)
    return by


async def let_a_minute_pass(world: EscalationWorld) -> None:
    values = {"held_until": datetime.now(UTC) - timedelta(seconds=1)}
    async with world.world.gateway.database.write() as connection:
        await connection.execute(sa.update(table).where(table.c.held_by.is_not(None)).values(values))


async def is_finished(world: EscalationWorld) -> bool:
    async with world.world.gateway.database.read() as connection:
        held = await connection.execute(sa.select(table.c.id).where(table.c.held_by.is_not(None)))
        return held.first() is None


async def read_events(world: EscalationWorld, **params: str) -> list[dict[str, Any]]:
    answer = await world.world.call("GET", "/api/v1/audit", params=params)
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


@pytest.mark.parametrize(
    ("state", "verb", "reached", "moved"),
    [
        ("active", "revert", "registered", "alias.rollback"),
        ("active", "close", "closed", "alias.rollback"),
        ("registered", "activate", "active", "alias.set"),
    ],
)
async def test_a_verb_whose_gateway_was_killed_before_its_note_is_noted_by_another(
    world: EscalationWorld, state: str, verb: str, reached: str, moved: str
) -> None:
    public_id = await world.lead_to(state)
    service = world.world.gateway.escalations
    options: dict[str, Any] = {"wait_s": 0.0} if verb == "activate" else {"reason": None}
    by = await kill(world, lambda by: getattr(service, verb)(by, public_id, **options), at="_note")
    before = await world.show(public_id)
    assert before["state"] == state, "it was not noted"
    busy = await world.do(public_id, verb)
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "conflict")
    await let_a_minute_pass(world)
    await until(lambda: is_finished(world))
    after = await world.show(public_id)
    assert (after["state"], after["history"][:-1]) == (reached, before["history"])
    step = after["history"][-1]
    assert (step["verb"], step["from_state"], step["to_state"]) == (verb, state, reached)
    assert (step["actor"], step["key_id"], step["request_id"]) == ("grace", "key_of_grace", by.request_id)
    told = await read_events(world, request_id=by.request_id)
    actions = [event["action"] for event in told]
    assert actions.count(moved) == actions.count(f"escalation.{DONE[verb]}") == 1
    assert {event["actor"] for event in told} == {"grace"}
    assert await world.live() == ([(2, 100)] if reached == "active" else [(1, 100)])


async def test_a_verb_whose_gateway_was_killed_before_it_moved_anything_is_done_too(world: EscalationWorld) -> None:
    public_id = await world.lead_to("active")
    service = world.world.gateway.escalations
    by = await kill(world, lambda by: service.revert(by, public_id, None), at="revert_full")
    assert await world.live() == [(2, 100)]
    await let_a_minute_pass(world)
    await until(lambda: is_finished(world))
    shown = await world.show(public_id)
    step = shown["history"][-1]
    assert (shown["state"], step["actor"], step["request_id"]) == ("registered", "gateway", by.request_id)
    assert await world.live() == [(1, 100)]


async def test_a_registration_that_was_cut_off_leaves_nothing_that_is_served(world: EscalationWorld) -> None:
    from loraplex.escalations.act import Registration

    public_id = await world.lead_to("approved")
    service = world.world.gateway.escalations
    wanted = Registration(pool=POOL, digest=FULL, cost_per_month=None)
    await kill(world, lambda by: service.register(by, public_id, wanted), at="_note")
    version = (await world.world.call("GET", f"{A}/versions/2")).json()
    assert (version["kind"], version["state"]) == ("full", "ready")
    await let_a_minute_pass(world)
    await until(lambda: is_finished(world))
    assert (await world.world.call("GET", f"{A}/versions/2")).json()["state"] == "retired"
    shown = await world.show(public_id)
    assert (shown["state"], shown["history"][-1]["verb"]) == ("approved", "approve")
    assert (await world.do(public_id, "register", pool=POOL, digest=FULL)).status_code == 200
