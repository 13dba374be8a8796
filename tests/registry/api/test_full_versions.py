"""Full fine-tunes as versions: every act once or again, what they leave behind, and what others may do meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import select

from loraplex_registry.db.model import EventRow
from loraplex_registry.errors import ConflictError, InvalidRequestError, NotFoundError, QuarantinedError
from registry_world import World

T = "/api/v1/tenants/team-a/adapters"
A = f"{T}/style"
ESC, POOL = "esc_one", "team-a-full"
FULL = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64


@pytest.fixture
async def adapter(world: World, make_adapter: Any) -> None:
    for seed in (1, 2):
        assert (await world.caller().upload(A, make_adapter(seed))).status_code == 201


@pytest.fixture
def admin(world: World) -> Any:
    return world.identity("team-a", role="admin")


async def live(world: World, alias: str = "live") -> list[tuple[int, int]]:
    answer = await world.caller()("GET", f"{A}/aliases/{alias}")
    return [(one["version"], one["weight"]) for one in answer.json().get("targets", [])]


async def put(world: World, alias: str, *targets: tuple[int, int]) -> Any:
    body = {"targets": [{"version": version, "weight": weight} for version, weight in targets]}
    seen = (await world.caller()("GET", f"{A}/aliases/{alias}")).headers.get("etag")
    headers = {"If-Match": seen} if seen else {"If-None-Match": "*"}
    return await world.caller()("PUT", f"{A}/aliases/{alias}", json=body, headers=headers)


async def show(world: World, number: int) -> dict[str, Any]:
    shown: dict[str, Any] = (await world.caller()("GET", f"{A}/versions/{number}")).json()
    return shown


async def test_registering_makes_the_next_version_once(world: World, adapter: None, admin: Any) -> None:
    registry = world.registry
    first = await registry.register_full(admin, "style", ESC, POOL, FULL)
    assert (first.version, first.kind, first.state, first.pool, first.promoted) == (3, "full", "ready", POOL, False)
    assert (first.rank, first.size_bytes, first.target_modules) == (0, 0, ())
    assert await registry.register_full(admin, "style", ESC, POOL, FULL) == first
    assert await live(world) == [(1, 100)]
    (name,) = (await registry.names_delta(0)).adapters
    assert [(one.number, one.kind, one.pool) for one in name.versions] == [
        (1, "lora", None), (2, "lora", None), (3, "full", POOL),
    ]  # fmt: skip
    assert (await show(world, 3))["pool"] == POOL
    # its numbers go on
    assert await registry.register_full(admin, "style", ESC, POOL, OTHER) != first
    assert ((await show(world, 3))["state"], (await show(world, 4))["state"]) == ("retired", "ready")


async def test_activating_moves_live_and_reverting_moves_it_back(world: World, adapter: None, admin: Any) -> None:
    registry = world.registry
    await put(world, "live", (1, 90), (2, 10))
    await registry.register_full(admin, "style", ESC, POOL, FULL)
    for _ in range(2):
        view, replaced = await registry.activate_full(admin, "style", ESC)
        assert (view.version, view.promoted) == (3, True)
        assert [(one.version, one.weight) for one in replaced.targets] == [(1, 90), (2, 10)]
        assert await live(world) == [(3, 100)]
    history = (await world.caller()("GET", f"{A}/aliases/live/history")).json()["data"]
    assert [one["action"] for one in history] == ["set", "set", "upload"]
    for _ in range(2):
        await registry.revert_full(admin, "style", ESC)
        assert await live(world) == [(1, 90), (2, 10)]
    async with registry.services.database.read() as session:
        actions = (await session.execute(select(EventRow.action).order_by(EventRow.id))).scalars().all()
    assert actions[-3:] == ["adapter.version_created", "alias.set", "alias.rollback"]


async def test_an_adapter_that_was_never_live_is_so_again_after_reverting(
    world: World, make_adapter: Any, admin: Any
) -> None:
    await world.caller().upload(A, make_adapter(1), params={"promote": "never"})
    await world.registry.register_full(admin, "style", ESC, POOL, FULL)
    await world.registry.activate_full(admin, "style", ESC)
    assert await live(world) == [(2, 100)]
    await world.registry.revert_full(admin, "style", ESC)
    assert await live(world) == []


async def test_where_somebody_has_moved_live_since_it_stays(world: World, adapter: None, admin: Any) -> None:
    await world.registry.register_full(admin, "style", ESC, POOL, FULL)
    await world.registry.activate_full(admin, "style", ESC)
    await put(world, "live", (2, 100))
    await world.registry.revert_full(admin, "style", ESC)
    assert await live(world) == [(2, 100)]


async def test_live_leads_to_it_by_activating_alone(world: World, adapter: None, admin: Any) -> None:
    await world.registry.register_full(admin, "style", ESC, POOL, FULL)
    assert (await put(world, "canary", (3, 100))).status_code == 201
    for targets in ([(3, 100)], [(1, 90), (3, 10)]):
        refused = await put(world, "live", *targets)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        assert "escalations activate" in refused.json()["error"]["message"]
    await world.registry.activate_full(admin, "style", ESC)
    assert (await put(world, "live", (1, 90), (3, 10))).status_code == 200
    await world.registry.revert_full(admin, "style", ESC)
    assert await live(world) == [(1, 100)]
    # what `live` led to before: the full fine-tune
    assert (await world.caller()("POST", f"{A}/aliases/live/rollback")).status_code == 409
    assert await live(world) == [(1, 100)]


@pytest.mark.parametrize("ends", ["revert", "withdraw"])
async def test_rollback_passes_over_a_full_fine_tune_that_is_over(
    world: World, adapter: None, admin: Any, ends: str
) -> None:
    registry = world.registry
    await put(world, "live", (2, 100))
    await registry.register_full(admin, "style", ESC, POOL, FULL)
    await registry.activate_full(admin, "style", ESC)
    await (registry.revert_full if ends == "revert" else registry.withdraw_full)(admin, "style", ESC)
    assert await live(world) == [(2, 100)]
    for expected in (1, 2):
        assert (await world.caller()("POST", f"{A}/aliases/live/rollback")).status_code == 200
        assert await live(world) == [(expected, 100)]


async def test_another_alias_rolls_back_past_a_full_fine_tune_that_was_closed(
    world: World, adapter: None, admin: Any
) -> None:
    await put(world, "canary", (1, 100))
    await world.registry.register_full(admin, "style", ESC, POOL, FULL)
    await put(world, "canary", (3, 100))
    await put(world, "canary", (2, 100))
    await world.registry.withdraw_full(admin, "style", ESC)
    assert (await world.caller()("POST", f"{A}/aliases/canary/rollback")).status_code == 200
    assert await live(world, "canary") == [(1, 100)]
    refused = await put(world, "canary", (3, 100))
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "targets")
    assert "its escalation is closed" in refused.json()["error"]["message"]


async def test_what_it_replaced_is_not_retired_meanwhile(world: World, adapter: None, admin: Any) -> None:
    await world.registry.register_full(admin, "style", ESC, POOL, FULL)
    await world.registry.activate_full(admin, "style", ESC)
    answer = await world.caller()("DELETE", f"{A}/versions/1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    assert "live again when the escalation of version 3 is reverted" in answer.json()["error"]["message"]
    assert (await world.caller()("DELETE", f"{A}/versions/2")).status_code == 200
    await world.registry.withdraw_full(admin, "style", ESC)
    assert await live(world) == [(1, 100)]


async def test_withdrawing_ends_it_and_nobody_brings_it_back_alone(world: World, adapter: None, admin: Any) -> None:
    registry = world.registry
    await registry.register_full(admin, "style", ESC, POOL, FULL)
    await registry.activate_full(admin, "style", ESC)
    assert (await world.caller()("DELETE", f"{A}/versions/3")).status_code == 409
    for _ in range(2):
        await registry.withdraw_full(admin, "style", ESC)
        assert (await live(world), (await show(world, 3))["state"]) == ([(1, 100)], "retired")
    restored = await world.caller(None, role="admin")("POST", f"{A}/versions/3/restore")
    assert restored.status_code in (404, 409)
    restored = await world.caller()("POST", f"{A}/versions/3/restore")
    assert (restored.status_code, restored.json()["error"]["code"]) == (409, "conflict")
    file = await world.caller()("GET", f"{A}/versions/3/files/adapter_config.json")
    assert (file.status_code, file.json()["error"]["code"]) == (404, "not_found")
    assert f"whoever runs its pool {POOL} has them" in file.json()["error"]["message"]
    # a later escalation may bring the same content again, under another number
    again = await registry.register_full(admin, "style", "esc_two", POOL, FULL)
    assert (again.version, (await show(world, 3))["state"]) == (4, "purged")
    purged = await world.caller()("POST", f"{A}/versions/3/restore")
    assert (purged.status_code, purged.json()["error"]["code"]) == (410, "adapter_retired")
    assert "open a new escalation" in purged.json()["error"]["message"]


async def test_an_alias_that_names_it_keeps_it_from_being_withdrawn(world: World, adapter: None, admin: Any) -> None:
    registry = world.registry
    await registry.register_full(admin, "style", ESC, POOL, FULL)
    assert (await put(world, "canary", (3, 100))).status_code in (200, 201)
    await registry.activate_full(admin, "style", ESC)
    with pytest.raises(ConflictError, match="alias canary targets version 3"):
        await registry.withdraw_full(admin, "style", ESC)
    assert await live(world) == [(3, 100)], "nothing has changed"


async def test_a_pool_serves_one_full_fine_tune(world: World, adapter: None, make_adapter: Any, admin: Any) -> None:
    await world.caller().upload(f"{T}/other", make_adapter(5))
    await world.registry.register_full(admin, "style", ESC, POOL, FULL)
    with pytest.raises(ConflictError, match="serves team-a/style@3"):
        await world.registry.register_full(admin, "other", "esc_two", POOL, OTHER)
    await world.caller()("DELETE", A)
    assert (await world.registry.register_full(admin, "other", "esc_two", POOL, OTHER)).version == 2


async def test_what_cannot_be_is_refused(world: World, adapter: None, make_adapter: Any, admin: Any) -> None:
    registry = world.registry
    with pytest.raises(InvalidRequestError):
        await registry.register_full(admin, "style", ESC, POOL, "sha256:abc")
    with pytest.raises(NotFoundError):
        await registry.register_full(admin, "nothing", ESC, POOL, FULL)
    lora = (await show(world, 1))["digest"]
    with pytest.raises(ConflictError, match="version 1 already"):
        await registry.register_full(admin, "style", ESC, POOL, lora)
    with pytest.raises(NotFoundError, match="no full fine-tune"):
        await registry.activate_full(admin, "style", ESC)
    await registry.register_full(admin, "style", ESC, POOL, FULL)
    assert (await world.caller("team-a", role="admin")("POST", f"{A}/versions/3/quarantine")).status_code == 200
    with pytest.raises(QuarantinedError):
        await registry.activate_full(admin, "style", ESC)


async def test_a_deleted_adapter_leaves_nothing_to_revert(world: World, adapter: None, admin: Any) -> None:
    await world.registry.register_full(admin, "style", ESC, POOL, FULL)
    await world.registry.activate_full(admin, "style", ESC)
    await world.caller()("DELETE", A)
    await world.registry.revert_full(admin, "style", ESC)
    await world.registry.withdraw_full(admin, "style", ESC)


async def test_acts_at_once_are_one_act(world: World, adapter: None, admin: Any) -> None:
    registry = world.registry
    views = await asyncio.gather(*(registry.register_full(admin, "style", ESC, POOL, FULL) for _ in range(4)))
    assert {view.version for view in views} == {3}
    await asyncio.gather(*(registry.activate_full(admin, "style", ESC) for _ in range(4)))
    history = (await world.caller()("GET", f"{A}/aliases/live/history")).json()["data"]
    assert [one["action"] for one in history] == ["set", "upload"]


async def test_a_lora_is_measured_from_its_stored_file(world: World, adapter: None, admin: Any) -> None:
    measured = await world.registry.measure_saturation(admin, "style", None)
    assert (measured.version, measured.problem, measured.base) == (1, None, "tiny-llama")
    assert measured.saturation is not None
    assert measured.saturation.num_modules == 4
    assert all(one.effective_rank > 6 for one in measured.saturation.modules), "random matrices of rank 8"
    await world.registry.register_full(admin, "style", ESC, POOL, FULL)
    with pytest.raises(ConflictError, match="is a full fine-tune"):
        await world.registry.measure_saturation(admin, "style", 3)
    with pytest.raises(NotFoundError):
        await world.registry.measure_saturation(admin, "style", 9)
    assert (await world.registry.measure_saturation(admin, "style", 2)).version == 2
