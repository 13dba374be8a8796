"""Escalations over HTTP, with a scripted engine that serves the full model: who may what, what moves, what stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import sqlalchemy as sa

from escalation_world import (
    FULL,
    OTHER,
    POOL,
    EscalationWorld,
    build_approval,
    build_evidence,
    in_days,
    running_escalations,
)
from gateway_world import until
from loraplex.db.tables import escalation as table
from loraplex.openapi.document import build_document
from loraplex_registry.app import MESSAGES
from loraplex_registry.peft.saturation_process import SaturationAnswer, SaturationJob, answer_job


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(
    database_url: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EscalationWorld]:
    if "evidence_to_the_model" not in request.node.name:
        monkeypatch.setattr("loraplex_registry.saturation._run", _measure_here)
    async with running_escalations(database_url, tmp_path) as running:
        yield running


DOCUMENT = build_document(MESSAGES)


def check_described(name: str, answer: Any) -> None:
    """An answer is what the OpenAPI document says of it."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(schema).validate(answer)


async def _measure_here(job: SaturationJob) -> SaturationAnswer:
    """The same figures without a process for each."""
    return await asyncio.to_thread(answer_job, job)


def check_error(answer: Any, status: int, code: str, param: str | None = None) -> str:
    body = answer.json()
    assert (answer.status_code, body["error"]["code"]) == (status, code), answer.text
    if param is not None:
        assert body["error"]["param"] == param
    message: str = body["error"]["message"]
    return message


async def set_columns(world: EscalationWorld, public_id: str, **columns: Any) -> None:
    """Let columns of an escalation be others than they were."""
    async with world.world.gateway.database.write() as connection:
        await connection.execute(sa.update(table).where(table.c.public_id == public_id).values(columns))


def ago(seconds: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)


async def test_from_the_evidence_to_the_model_and_back(world: EscalationWorld) -> None:
    opened = await world.open()
    assert opened.status_code == 201, opened.text
    found = opened.json()
    check_described("WholeEscalationView", found)
    public_id = found["id"]
    assert (found["state"], found["adapter"], found["version"], found["base_model"]) == (
        "requested",
        "default",
        1,
        "tiny",
    )
    assert found["evidence"] == build_evidence()
    gap = found["figures"]["gap"]
    assert (gap["higher_is_better"], gap["closed"], gap["gain_of_last_rank"]) == (True, 0.5, 0.1)
    saturation = found["figures"]["saturation"]
    assert (saturation["num_modules"], saturation["rank"], len(saturation["modules"])) == (4, 2, 4)
    assert all(1 < one["effective_rank"] <= 2 for one in saturation["modules"])
    assert found["figures"]["problem"] is None
    assert found["figures"]["traffic"]["requests"] == 0
    assert found["verbs"] == ["approve", "reject", "close"]

    answer = await world.do(public_id, "approve", **build_approval())
    approval = answer.json()["approval"]
    assert (approval["owner"], approval["approved_by"], approval["budget_per_month"]) == ("grace", "grace", 2500.5)
    answer = await world.do(public_id, "register", pool=POOL, digest=FULL, cost_per_month=2000)
    assert answer.json()["full"] == {
        "model": "team-x/default@2", "version": 2, "pool": POOL, "digest": FULL, "cost_per_month": 2000.0,
        "currency": "EUR",
    }  # fmt: skip
    assert await world.live() == [(1, 100)]
    assert (await world.do(public_id, "activate")).json()["state"] == "active"
    assert await world.live() == [(2, 100)]

    answered = await world.world.complete("team-x", "answer", world.team)
    assert answered.status_code == 200, answered.text
    assert (answered.headers["x-loraplex-model"], answered.headers["x-loraplex-digest"]) == ("team-x/default@2", FULL)
    assert world.engine.calls[-1]["body"]["model"] == FULL
    assert not world.world.engine.calls
    (row,) = await world.world.usage()
    assert (row["version"], row["digest"], row["outcome"], row["replica"]) == (2, FULL, "ok", world.engine.url)

    assert (await world.do(public_id, "revert")).json()["state"] == "registered"
    assert await world.live() == [(1, 100)]
    answered = await world.world.complete("team-x", "answer", world.team)
    assert answered.headers["x-loraplex-model"] == "team-x/default@1"
    assert (await world.do(public_id, "activate")).json()["state"] == "active"
    closed = (await world.do(public_id, "close", reason="The next LoRA was enough.")).json()
    assert (closed["state"], closed["verbs"]) == ("closed", [])
    check_described("WholeEscalationView", closed)
    assert await world.live() == [(1, 100)]
    check_error(await world.world.complete("team-x/default@2", "answer", world.team), 410, "adapter_retired")
    steps = [(step["verb"], step["from_state"], step["to_state"], step["actor"]) for step in closed["history"]]
    assert steps == [
        ("open", None, "requested", "tina"), ("approve", "requested", "approved", "grace"),
        ("register", "approved", "registered", "grace"), ("activate", "registered", "active", "grace"),
        ("revert", "active", "registered", "grace"), ("activate", "registered", "active", "grace"),
        ("close", "active", "closed", "grace"),
    ]  # fmt: skip
    assert closed["history"][-1]["details"] == {"reason": "The next LoRA was enough."}
    events = (await world.world.call("GET", f"/api/v1/audit?subject={public_id}")).json()["data"]
    assert [one["action"] for one in events][::-1][:3] == [
        "escalation.opened", "escalation.approved", "escalation.registered",
    ]  # fmt: skip


class Serving:
    """The pool serves it, or nobody does."""

    async def the_pool_that_is_down_is_503_and_never_the_adapter(world: EscalationWorld) -> None:
        public_id = await world.lead_to("registered")
        world.engine.serve_full("team-x-full-v1", OTHER)
        await world.world.gateway.fleet.poll()
        message = check_error(await world.do(public_id, "activate", wait_s=0.1), 503, "no_replica")
        assert "expected" in message or "not" in message
        assert (await world.show(public_id))["state"] == "registered"
        assert await world.live() == [(1, 100)]
        world.engine.serve_full("team-x-full-v1", FULL)
        assert (await world.do(public_id, "activate", wait_s=60)).status_code == 200
        world.engine.state_changes["is_ready"] = False
        await world.world.gateway.fleet.poll()
        answer = await world.world.complete("team-x", "answer", world.team)
        check_error(answer, 503, "no_replica")
        assert int(answer.headers["retry-after"]) >= 1
        assert not world.world.engine.calls, "the adapter's engine was not asked"
        world.engine.state_changes["is_ready"] = True

    async def activating_waits_for_the_pool(world: EscalationWorld) -> None:
        world.engine.state_changes["is_ready"] = False
        public_id = await world.lead_to("registered")
        await world.world.gateway.fleet.poll()
        activating = asyncio.create_task(world.do(public_id, "activate", wait_s=60))
        await asyncio.sleep(0.5)
        assert not activating.done()
        world.engine.state_changes["is_ready"] = True
        assert (await activating).json()["state"] == "active"

    async def an_engine_that_was_swapped_between_two_looks_does_not_answer(world: EscalationWorld) -> None:
        await world.lead_to("active")
        world.engine.own_digest = OTHER
        check_error(await world.world.complete("team-x", "answer", world.team), 502, "replica_failed")
        world.engine.own_digest = FULL


class FourEyes:
    """Requester and approver differ in owner and in who issued their keys."""

    async def nobody_approves_what_they_asked_for(world: EscalationWorld) -> None:
        opened = (await world.open(key=world.admin)).json()
        check_error(await world.do(opened["id"], "approve", **build_approval()), 403, "permission_denied")
        assert (await world.show(opened["id"]))["state"] == "requested"

    async def nor_under_another_spelling_of_their_name(world: EscalationWorld) -> None:
        opened = (await world.open()).json()
        tina = await world.world.create_key("staff", role="admin", owner=" TINA")
        message = check_error(
            await world.do(opened["id"], "approve", tina, **build_approval()), 403, "permission_denied"
        )
        assert "asked for this" in message

    async def nor_with_a_key_that_the_same_hand_issued(world: EscalationWorld) -> None:
        opened = (await world.open()).json()
        ada = await world.world.create_key("staff", role="admin", owner="ada")
        body = {"name": "second", "role": "admin", "owner": "mallory"}
        key = (await world.world.call("POST", "/api/v1/tenants/staff/keys", key=ada, json=body)).json()["key"]
        message = check_error(
            await world.do(opened["id"], "approve", key, **build_approval()), 403, "permission_denied"
        )
        assert "ada issued both" in message

    async def nor_after_a_rotation(world: EscalationWorld) -> None:
        """A rotated key was issued by whoever issued the first of its line."""
        keys = (await world.world.call("GET", "/api/v1/tenants/team-x/keys")).json()["data"]
        path = f"/api/v1/tenants/team-x/keys/{keys[0]['id']}/rotate"
        rotated = await world.world.call("POST", path, key=world.admin, json={"overlap_s": 0})
        assert rotated.status_code in (200, 201), rotated.text
        world.team = rotated.json()["key"]
        opened = (await world.open()).json()
        ada = await world.world.create_key("staff", role="admin", owner="ada")
        body = {"name": "second", "role": "admin", "owner": "mallory"}
        key = (await world.world.call("POST", "/api/v1/tenants/staff/keys", key=ada, json=body)).json()["key"]
        check_error(await world.do(opened["id"], "approve", key, **build_approval()), 403, "permission_denied")

    async def the_bootstrap_key_approves_only_alone(world: EscalationWorld) -> None:
        opened = (await world.open()).json()
        path = f"/api/v1/escalations/{opened['id']}/approve"
        refused = await world.world.call("POST", path, json=build_approval())
        assert "bootstrap key" in check_error(refused, 403, "permission_denied")
        for key in (await world.world.call("GET", "/api/v1/tenants/staff/keys")).json()["data"]:
            await world.world.call("DELETE", f"/api/v1/tenants/staff/keys/{key['id']}")
        assert (await world.world.call("POST", path, json=build_approval())).status_code == 200


VERBS = ("approve", "reject", "register", "activate", "extend", "revert", "close")


class Permission:
    """Teams ask, take back and end; administrators do the rest; strangers see nothing."""

    async def another_teams_escalation_is_not_there(world: EscalationWorld) -> None:
        public_id = await world.lead_to("registered")
        missing = "esc_" + "a" * 26
        for method, verb in [
            ("GET", ""),
            *(("POST", f"/{verb}") for verb in VERBS),
        ]:
            path = "/api/v1/escalations/{}" + verb
            foreign = await world.world.call(method, path.format(public_id), key=world.other_team, json={})
            nothing = await world.world.call(method, path.format(missing), key=world.other_team, json={})
            assert check_error(foreign, 404, "not_found") == check_error(nothing, 404, "not_found")
        path = "/api/v1/tenants/team-x/escalations"
        check_error(await world.world.call("POST", path, key=world.other_team, json={}), 404, "not_found", "tenant")
        listed = await world.world.call("GET", "/api/v1/escalations", key=world.other_team)
        assert listed.json() == {"data": [], "next_cursor": None}
        check_error(
            await world.world.call("GET", "/api/v1/escalations?tenant=team-x", key=world.other_team), 404, "not_found"
        )

    async def a_team_cannot_say_yes_to_itself_but_may_go_back(world: EscalationWorld) -> None:
        public_id = await world.lead_to("active")
        for verb in ("approve", "reject", "register", "activate", "extend"):
            check_error(await world.do(public_id, verb, world.team), 403, "permission_denied")
        assert (await world.do(public_id, "revert", world.team)).json()["state"] == "registered"
        assert (await world.do(public_id, "close", world.team)).json()["state"] == "closed"

    async def without_the_scope_there_is_nothing(world: EscalationWorld) -> None:
        public_id = await world.lead_to("requested")
        key = await world.world.create_key("team-x", scopes=["infer", "adapters:write"])
        for method, path in (
            ("GET", "/api/v1/escalations"),
            ("GET", f"/api/v1/escalations/{public_id}"),
            ("POST", "/api/v1/tenants/team-x/escalations"),
            ("POST", f"/api/v1/escalations/{public_id}/close"),
        ):
            check_error(await world.world.call(method, path, key=key, json={}), 403, "permission_denied")

    async def a_read_only_admin_reads(world: EscalationWorld) -> None:
        public_id = await world.lead_to("requested")
        key = await world.world.create_key("staff", role="admin_readonly")
        assert (await world.show(public_id, key))["id"] == public_id
        assert (await world.world.call("GET", "/api/v1/escalations/report", key=key)).status_code == 200
        for verb in VERBS:
            check_error(await world.do(public_id, verb, key), 403, "permission_denied")
        check_error(
            await world.world.call("GET", "/api/v1/escalations/report", key=world.team), 403, "permission_denied"
        )

    async def ids_that_are_none_are_not_found(world: EscalationWorld) -> None:
        for strange in ("esc_1", "x", "esc_" + "A" * 26, "%00", "report2"):
            answer = await world.world.call("GET", f"/api/v1/escalations/{strange}", key=world.admin)
            check_error(answer, 404, "not_found")


BAD_EVIDENCE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"lora": 0.7}, "evidence.lora"),
    ({"lora": 0.9}, "evidence.lora"),
    ({"target": 0.4}, "evidence.target"),
    ({"ranks_tried": []}, "evidence.ranks_tried"),
    ({"ranks_tried": [{"rank": 8, "value": 0.1}] * 2}, "evidence.ranks_tried"),
    ({"ranks_tried": [{"rank": 64, "value": 0.71}]}, "evidence.ranks_tried"),
    ({"ranks_tried": [{"rank": 0, "value": 0.1}]}, "evidence.ranks_tried.0.rank"),
    ({"data_digest": "sha256:abc"}, "evidence.data_digest"),
    ({"num_samples": 0}, "evidence.num_samples"),
    ({"base": 1e300}, "evidence.base"),
    ({"evaluation": " "}, "evidence.evaluation"),
)


class Opening:
    """What is asked for must be worth asking."""

    async def evidence_that_is_none_is_refused(world: EscalationWorld) -> None:
        for changes, param in BAD_EVIDENCE:
            answer = await world.open(evidence=build_evidence(**changes))
            assert answer.status_code == 400, (changes, answer.text)
            assert answer.json()["error"]["param"].replace("[", ".").replace("]", "") == param

    async def a_metric_may_be_better_low(world: EscalationWorld) -> None:
        evidence = build_evidence(base=3.0, lora=2.5, target=2.0, ranks_tried=[{"rank": 8, "value": 2.5}])
        gap = (await world.open(evidence=evidence)).json()["figures"]["gap"]
        assert (gap["higher_is_better"], gap["closed"], gap["gain_of_last_rank"]) == (False, 0.5, None)

    async def one_adapter_has_one_that_is_open(world: EscalationWorld) -> None:
        first = (await world.open()).json()["id"]
        assert first in check_error(await world.open(), 409, "conflict", "adapter")
        answers = await asyncio.gather(*(world.open() for _ in range(3)))
        assert {answer.status_code for answer in answers} == {409}
        await world.do(first, "reject", reason="Try rank 64 first.")
        answers = await asyncio.gather(*(world.open() for _ in range(4)))
        assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409]

    async def one_that_has_expired_stands_in_nobodys_way(world: EscalationWorld) -> None:
        first = (await world.open()).json()["id"]
        async with world.world.gateway.database.write() as connection:
            values = {"expires_at": ago(-0.01)}
            await connection.execute(sa.update(table).where(table.c.public_id == first).values(values))
        await asyncio.sleep(0.02)
        assert (await world.open()).status_code == 201
        assert (await world.show(first))["state"] == "expired"

    async def an_adapter_that_is_not_there_is_not_found(world: EscalationWorld) -> None:
        for adapter in ("nothing", "No Name"):
            check_error(await world.open(adapter=adapter), 404, "not_found", "adapter")
        check_error(await world.open(version=7), 404, "not_found", "version")
        check_error(await world.open(surplus=1), 400, "unknown_parameter", "surplus")
        check_error(await world.open(expires_at=in_days(-1)), 400, "invalid_request_error", "expires_at")

    async def an_idempotency_key_does_its_work_once(world: EscalationWorld) -> None:
        headers = {"idempotency-key": "one"}
        answers = [await world.open(headers=headers) for _ in range(3)]
        assert {answer.status_code for answer in answers} == {201}
        assert len({answer.content for answer in answers}) == 1
        check_error(await world.open(headers=headers, reason="Other."), 422, "idempotency_key_reused")
        check_error(await world.open(headers={"idempotency-key": "two"}), 409, "conflict", "adapter")
        # what failed may be repeated
        await world.do(answers[0].json()["id"], "close")
        assert (await world.open(headers={"idempotency-key": "two"})).status_code == 201
        check_error(await world.open(headers={"idempotency-key": "a b"}), 400, "invalid_request_error")


class Approval:
    """Yes needs an owner, a reason, a budget and a day."""

    async def nothing_may_be_missing_or_nonsense(world: EscalationWorld) -> None:
        public_id = await world.lead_to("requested")
        for name in ("owner", "justification", "budget_per_month", "review_at"):
            body = build_approval()
            del body[name]
            check_error(await world.do(public_id, "approve", **body), 400, "invalid_request_error", name)
        for name, value in (
            ("owner", ""), ("justification", " "), ("budget_per_month", -1), ("budget_per_month", 0.001),
            ("budget_per_month", 1e13), ("currency", "euro"), ("review_at", in_days(-1)), ("review_at", in_days(400)),
            ("on_overdue", "explode"),
        ):  # fmt: skip
            answer = await world.do(public_id, "approve", **build_approval(**{name: value}))
            check_error(answer, 400, "invalid_request_error", name)
        assert (await world.show(public_id))["state"] == "requested"

    async def a_verb_that_leads_nowhere_names_the_state(world: EscalationWorld) -> None:
        public_id = await world.lead_to("requested")
        for verb, body in (("activate", {}), ("revert", {}), ("register", {"pool": POOL, "digest": FULL})):
            message = check_error(await world.do(public_id, verb, **body), 409, "conflict", "state")
            assert message.startswith("This escalation is requested; what can be done now: approve, reject, close")
        await world.do(public_id, "reject", reason="No.")
        message = check_error(await world.do(public_id, "close"), 409, "conflict", "state")
        assert message.startswith("This escalation is rejected; nothing more can be done")

    async def extending_moves_the_day(world: EscalationWorld) -> None:
        public_id = await world.lead_to("approved")
        later = in_days(90)
        assert (await world.do(public_id, "extend", review_at=later)).status_code == 200
        check_error(
            await world.do(public_id, "extend", review_at=in_days(60)), 400, "invalid_request_error", "review_at"
        )


class Registering:
    """Only what an operator has configured, for no more than was approved."""

    async def other_things_are_refused(world: EscalationWorld) -> None:
        public_id = await world.lead_to("approved")
        for body, param in (
            ({"pool": "http://evil:80", "digest": FULL}, "pool"),
            ({"pool": "main", "digest": FULL}, "pool"),
            ({"pool": POOL, "digest": "sha256:abc"}, "digest"),
            ({"pool": POOL, "digest": FULL, "cost_per_month": 2500.51}, "cost_per_month"),
            ({"pool": POOL, "digest": FULL, "cost_per_month": -1}, "cost_per_month"),
        ):
            check_error(await world.do(public_id, "register", **body), 400, "invalid_request_error", param)
        assert (await world.show(public_id))["state"] == "approved"
        # the hold was given back
        assert (await world.do(public_id, "register", pool=POOL, digest=FULL)).status_code == 200

    async def without_a_cost_it_costs_what_was_approved(world: EscalationWorld) -> None:
        public_id = await world.lead_to("registered")
        assert (await world.show(public_id))["cost_per_month"] == 2500.5

    async def two_at_once_register_one(world: EscalationWorld) -> None:
        public_id = await world.lead_to("approved")
        answers = await asyncio.gather(
            *(world.do(public_id, "register", pool=POOL, digest=digest) for digest in (FULL, OTHER, FULL, OTHER))
        )
        assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
        shown = await world.show(public_id)
        path = f"/api/v1/tenants/team-x/adapters/default/versions/{shown['full']['version']}"
        version = (await world.world.call("GET", path, key=world.team)).json()
        assert (version["digest"], version["state"], version["kind"]) == (shown["full"]["digest"], "ready", "full")

    async def a_gateway_that_died_in_between_leaves_what_can_be_done_again(world: EscalationWorld) -> None:
        public_id = await world.lead_to("approved")
        registry = world.world.gateway._registry
        by = _identity(world)
        other = await registry.register_full(by, "default", public_id, POOL, OTHER)
        registered = (await world.do(public_id, "register", pool=POOL, digest=FULL)).json()
        assert registered["full"]["version"] == other.version + 1
        await registry.activate_full(by, "default", public_id)
        assert (await world.do(public_id, "activate")).json()["state"] == "active"
        await registry.revert_full(by, "default", public_id)
        assert (await world.do(public_id, "revert")).json()["state"] == "registered"
        await registry.withdraw_full(by, "default", public_id)
        assert (await world.do(public_id, "close")).json()["state"] == "closed"
        assert await world.live() == [(1, 100)]

    async def one_that_is_held_is_not_moved_by_another_and_a_hold_ends(world: EscalationWorld) -> None:
        public_id = await world.lead_to("approved")
        await set_columns(world, public_id, held_by="hold_of_another", held_until=ago(-60))
        message = check_error(await world.do(public_id, "close"), 409, "conflict", "state")
        assert "Another request" in message
        await set_columns(world, public_id, held_until=ago(1))
        assert (await world.do(public_id, "close")).status_code == 200


async def has_step(world: EscalationWorld, public_id: str, verb: str) -> bool:
    return verb in [step["verb"] for step in (await world.show(public_id))["history"]]


def _identity(world: EscalationWorld) -> Any:
    from loraplex_registry.wire.identity import Identity

    tenant = world.world.gateway.directory.find_tenant("team-x")
    assert tenant is not None
    return Identity(
        role="admin", tenant_id=None, tenant=None, scopes=(), key_id="k", actor="grace", request_id="req_1",
        target_tenant_id=str(tenant.id), target_tenant="team-x",
    )  # fmt: skip


class Time:
    """What nobody does, the clock does."""

    async def what_nobody_answers_expires(world: EscalationWorld) -> None:
        public_id = await world.lead_to("requested")
        await set_columns(world, public_id, expires_at=ago(-0.05))
        await asyncio.sleep(0.06)
        assert (await world.show(public_id))["state"] == "expired"
        listed = await world.world.call("GET", "/api/v1/escalations?state=expired", key=world.admin)
        assert [one["id"] for one in listed.json()["data"]] == [public_id]
        await until(lambda: has_step(world, public_id, "expire"))
        check_error(await world.do(public_id, "approve", **build_approval()), 409, "conflict", "state")

    async def what_nobody_reviews_is_overdue_and_stays_where_it_is(world: EscalationWorld) -> None:
        public_id = await world.lead_to("active")
        await set_columns(world, public_id, review_at=ago(1))
        shown = await world.show(public_id)
        assert (shown["state"], shown["is_overdue"], shown["verbs"]) == ("overdue", True, ["revert", "extend", "close"])
        await until(lambda: has_step(world, public_id, "lapse"))
        assert await world.live() == [(shown["full"]["version"], 100)]
        report = (await world.world.call("GET", "/api/v1/escalations/report", key=world.admin)).json()
        assert (report["num_overdue"], report["num_active"]) == (1, 1)
        assert (await world.do(public_id, "extend", review_at=in_days(10))).json()["state"] == "active"

    async def or_is_reverted_once_if_so_agreed(world: EscalationWorld) -> None:
        public_id = await world.lead_to("active", on_overdue="revert")
        await set_columns(world, public_id, review_at=ago(1))
        await until(lambda: has_step(world, public_id, "revert"))
        assert await world.live() == [(1, 100)]
        assert (await world.show(public_id))["state"] == "registered"
        message = check_error(await world.do(public_id, "activate"), 409, "conflict", "state")
        assert "extend it first" in message
        await asyncio.sleep(1.2)
        verbs = [step["verb"] for step in (await world.show(public_id))["history"]]
        assert verbs[-2:] == ["lapse", "revert"]
        await world.do(public_id, "extend", review_at=in_days(10))
        assert (await world.do(public_id, "activate")).json()["state"] == "active"

    async def one_whose_adapter_is_gone_is_closed(world: EscalationWorld) -> None:
        public_id = await world.lead_to("active")
        await world.world.call("DELETE", "/api/v1/tenants/team-x/adapters/default", key=world.team)
        await set_columns(world, public_id, changed_at=ago(60))
        await until(lambda: has_step(world, public_id, "close"))
        assert (await world.show(public_id))["state"] == "closed"


class Showing:
    """Lists, the report, and what other pages show of a full fine-tune."""

    async def the_report_lists_all_and_says_what_forty_would_cost(world: EscalationWorld) -> None:
        public_id = await world.lead_to("active")
        report = (await world.world.call("GET", "/api/v1/escalations/report", key=world.admin)).json()
        check_described("EscalationReport", report)
        only = report["data"][0]
        assert (only["id"], only["owner"], only["age_days"], only["cost_per_month"]) == (public_id, "grace", 0, 2500.5)
        assert report["costs"] == [
            {
                "currency": "EUR", "num_full": 1, "cost_per_month": 2500.5, "mean_cost_per_month": 2500.5,
                "forty_would_cost_per_month": 100020.0,
            }
        ]  # fmt: skip
        # the figures of the brief
        assert report["forty_full_fine_tunes"] == {"teams": 40, "weights_gib": 598.4, "gpus": 8, "gpu": "H100 80 GB"}
        assert report["forty_adapters"] == {"teams": 40, "weights_gib": 15.97, "gpus": 1, "gpu": "H100 80 GB"}

    async def lists_come_in_pages_newest_first(world: EscalationWorld) -> None:
        ids = []
        for _ in range(3):
            ids.append((await world.open()).json()["id"])
            await world.do(ids[-1], "close")
        first = (await world.world.call("GET", "/api/v1/escalations?limit=2&tenant=team-x", key=world.admin)).json()
        check_described("EscalationView", first["data"][0])
        cursor = first["next_cursor"]
        second = (await world.world.call("GET", f"/api/v1/escalations?limit=2&cursor={cursor}", key=world.team)).json()
        assert [one["id"] for one in [*first["data"], *second["data"]]][:3] == ids[::-1]
        assert second["next_cursor"] is None
        lost = await world.world.call("GET", "/api/v1/escalations?state=lost", key=world.admin)
        check_error(lost, 400, "invalid_request_error")

    async def aliases_may_name_a_full_fine_tune_and_close_waits_for_them(world: EscalationWorld) -> None:
        public_id = await world.lead_to("registered")
        path = "/api/v1/tenants/team-x/adapters/default/aliases/canary"
        number = (await world.show(public_id))["full"]["version"]
        body = {"targets": [{"version": 1, "weight": 50}, {"version": number, "weight": 50}]}
        put = await world.world.call("PUT", path, key=world.team, json=body, headers={"if-none-match": "*"})
        assert put.status_code in (200, 201), put.text
        digests = set()
        for caller in range(12):
            headers = {"x-loraplex-canary-key": str(caller)}
            answer = await world.world.complete("team-x/default@canary", "answer", world.team, headers=headers)
            assert answer.status_code == 200, answer.text
            digests.add(answer.headers["x-loraplex-digest"])
        assert len(digests) == 2
        assert FULL in digests
        assert f"canary targets version {number}" in check_error(await world.do(public_id, "close"), 409, "conflict")
        await world.world.call("DELETE", path, key=world.team)
        assert (await world.do(public_id, "close")).status_code == 200

    async def warming_a_full_fine_tune_says_which_engines_hold_it(world: EscalationWorld) -> None:
        number = (await world.show(await world.lead_to("registered")))["full"]["version"]
        path = f"/api/v1/tenants/team-x/adapters/default/versions/{number}/warm"
        answer = await world.world.call("POST", path, key=world.team)
        (replica,) = answer.json()["replicas"]
        assert replica["state"] == "resident"
        assert not world.engine.asked_to_load
        assert not world.world.engine.asked_to_load


GROUPS = (Serving, FourEyes, Permission, Opening, Approval, Registering, Time, Showing)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
async def test_escalations(world: EscalationWorld, group: type) -> None:
    """One world for each group: its scenarios follow one another, and each begins with nothing open."""
    for name, scenario in vars(group).items():
        if not name.startswith("_"):
            await scenario(world)
            await world.end_all()
