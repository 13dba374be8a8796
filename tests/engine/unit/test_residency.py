"""Holds, drops and host memory of adapters."""

from __future__ import annotations

import mmap

import pytest

from loraplex_engine.loop.calls import AdapterCalls
from loraplex_engine.lora.health import MAX_CONTENT_FAILURES
from loraplex_engine.lora.packed import LoadDone, PackedAdapter
from loraplex_engine.slots.table import SlotState
from loraplex_engine.wire.messages import DropAdapter, LoadAdapter
from schedules import World


def _holds_nothing(world: World) -> bool:
    world.scheduler.check_integrity()
    residency = world.residency
    return (
        not world.bank.bound
        and not residency.host_digests
        and not residency.loading_digests
        and residency.tier_to_bytes == {"slot": 0, "host": 0, "disk": 0}
        and world.pool.num_free == world.pool.num_blocks
        and all(slot.state is SlotState.EMPTY for slot in residency.slots.slots)
    )


def test_five_hundred_requests_aborted_while_their_adapter_loads_leave_nothing() -> None:
    world = World()
    for index in range(500):
        world.request(f"r{index}", digest="cold")
        world.step()
    assert world.loader.num_started == 1
    for index in range(500):
        assert world.scheduler.abort(f"r{index}", "abort") is not None
        world.scheduler.check_integrity()
    world.residency.drop("cold")
    assert world.residency.is_draining("cold")
    world.loader.finish("cold")
    world.settle_loads()
    assert not world.residency.is_draining("cold")
    assert _holds_nothing(world)


def test_a_load_that_does_not_say_leaves_the_pin_as_it_was() -> None:
    world = World()
    calls = AdapterCalls(world.residency, 60.0, lambda: 0.0)
    pinned = []
    for call_id, pin in enumerate((None, True, None, False, None)):
        calls.add(LoadAdapter(call_id, "d1", pin))
        if call_id == 0:
            world.loader.finish("d1")
            world.settle_loads()
        (reply,) = calls.settle()
        slot_id = world.residency.slots.find("d1")
        assert slot_id is not None
        assert reply.body == {"digest": "d1", "slot": slot_id, "pinned": world.residency.slots.slots[slot_id].keep}
        pinned.append(world.residency.slots.slots[slot_id].keep)
    assert pinned == [False, True, True, False, False]


@pytest.mark.parametrize("forgive", [True, False])
def test_only_who_asks_to_forgive_hides_that_an_adapter_cannot_be_loaded(forgive: bool) -> None:
    world = World()
    calls = AdapterCalls(world.residency, 60.0, lambda: 0.0)
    for call_id in range(MAX_CONTENT_FAILURES):
        calls.add(LoadAdapter(call_id, "d1", pin=True, forgive=forgive))
        world.loader.fail("d1", is_content=True)
        world.settle_loads()
        (reply,) = calls.settle()
        assert reply.error is not None
        world.clock.now += 31
    failed = world.residency.health.state()["failed"]["d1"]
    assert failed["is_final"] is not forgive


def test_what_is_not_served_any_more_needs_no_pin() -> None:
    world = World()
    world.load("d1")
    calls = AdapterCalls(world.residency, 60.0, lambda: 0.0)
    calls.add(LoadAdapter(1, "d1", pin=True))
    assert [reply.error for reply in calls.settle()] == [None]
    for prompt in (b"a", b"b", b"c"):
        world.residency.health.strike("d1", prompt, "not finite")
    calls.add(LoadAdapter(2, "d1", pin=False, forgive=False))
    (reply,) = calls.settle()
    assert reply.error is not None
    assert not any(slot.keep for slot in world.residency.slots.slots)


def test_a_drop_ends_the_load_that_was_asked_for_before_it() -> None:
    world = World()
    calls = AdapterCalls(world.residency, 60.0, lambda: 0.0)
    calls.add(LoadAdapter(1, "d1", pin=False))
    calls.add(DropAdapter(2, "d1"))
    (refused,) = calls.settle()
    assert refused.call_id == 1
    assert refused.error is not None
    assert refused.error.code == "conflict"
    world.loader.finish("d1")
    world.settle_loads()
    assert [(reply.call_id, reply.error) for reply in calls.settle()] == [(2, None)]
    assert not calls.is_pending
    assert _holds_nothing(world)


def test_drop_lets_running_and_waiting_requests_end_and_then_gives_everything_back() -> None:
    world = World(budget=32, max_num_seqs=2)
    world.load("d1")
    for index in range(8):
        world.request(f"r{index}", digest="d1", max_tokens=3)
    world.step()
    world.residency.drop("d1")
    world.scheduler.abort("r1", "abort")
    ends = []
    while world.scheduler.running or world.scheduler.waiting:
        assert world.residency.is_draining("d1")
        assert world.residency.slots.slots[0].state is SlotState.DRAINING
        ends += [(event.request_id, event.finish) for event in world.step()[1] if event.finish]
    assert ends == [(f"r{index}", "length") for index in (0, 2, 3, 4, 5, 6, 7)]
    assert world.loader.num_started == 1
    assert not world.residency.is_draining("d1")
    assert _holds_nothing(world)


def test_request_that_was_on_its_way_at_a_drop_is_served_and_leaves_no_copy() -> None:
    world = World()
    world.load("d1")
    for index in range(200):
        world.residency.drop("d1")
        assert _holds_nothing(world)
        world.request(f"r{index}", digest="d1", max_tokens=1)
        world.step()
        world.loader.finish("d1")
        world.settle_loads()
        (event,) = world.step()[1]
        assert event.finish == "length"
        assert _holds_nothing(world)
    world.clock.now += 61
    world.request("later", digest="d1", max_tokens=1)
    world.step()
    world.loader.finish("d1")
    world.settle_loads()
    world.step()
    assert world.residency.host_digests == ("d1",)


def test_digest_that_is_asked_for_by_name_stays_after_all() -> None:
    world = World(budget=32)
    world.load("d1")
    world.request("r", digest="d1", max_tokens=2)
    world.step()
    world.residency.drop("d1")
    world.residency.welcome("d1")
    assert not world.residency.is_draining("d1")
    world.step()
    assert world.bank.bound == {0: "d1"}
    assert world.residency.slots.slots[0].state is SlotState.READY


def test_same_content_under_two_names_shares_a_slot_and_outlives_one_of_them() -> None:
    world = World(budget=32)
    world.load("same")
    first = world.request("of one name", digest="same")
    second = world.request("of another", digest="same")
    world.step()
    assert (first.slot, second.slot) == (0, 0)
    assert world.residency.slots.slots[0].num_pins == 2
    world.scheduler.abort("of one name", "abort")
    world.residency.drop("same")
    assert second.slot == 0
    assert world.bank.bound == {0: "same"}


def test_thousand_loads_and_drops_end_where_they_began() -> None:
    world = World(budget=64, num_slots=3, max_host=5)
    for index in range(1000):
        digest = f"d{index % 7}"
        if not world.residency.is_in_host(digest):
            world.load(digest)
        world.request(f"r{index}", digest=digest, max_tokens=1)
        world.step()
        if index % 3 == 0:
            world.residency.drop(digest)
        world.scheduler.check_integrity()
        assert world.residency.tier_to_bytes["host"] == 64 * len(world.residency.host_digests)
        assert world.residency.tier_to_bytes["slot"] == 64 * len(world.bank.bound)
    for index in range(7):
        world.residency.drop(f"d{index}")
    assert _holds_nothing(world)


@pytest.mark.parametrize("order", ["load first", "drop first"])
def test_drop_of_a_slot_that_an_operator_keeps_lets_go_of_it(order: str) -> None:
    world = World()
    world.load("d1")
    world.residency.try_make_ready("d1")
    if order == "load first":
        world.residency.keep("d1", is_kept=True)
    world.residency.drop("d1")
    world.residency.keep("d1", is_kept=True)
    assert _holds_nothing(world)


def test_disk_cache_is_counted_as_the_loader_last_saw_it() -> None:
    world = World(num_slots=1, max_host=1)
    for number in (1, 2):
        facts = LoadDone(f"d{number}", 64, 8, (), 0.0, 0.0, 0.0, disk_adapters=7, disk_bytes=100, disk_evictions=number)
        world.residency.prefetch(facts.digest)
        world.loader.hand_over(PackedAdapter(facts, mmap.mmap(-1, 64)))
        world.residency.poll()
        world.residency.try_make_ready(facts.digest)
    assert world.residency.tier_to_adapters == {"slot": 1, "host": 2, "disk": 7}
    assert world.residency.tier_to_bytes == {"slot": 64, "host": 128, "disk": 100}
    assert world.residency.tier_to_evictions == {"slot": 1, "host": 0, "disk": 3}


def test_adapter_that_its_slot_does_not_take_hurts_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(num_slots=2)
    world.load("good", "bad")
    bind = world.bank.bind

    def fail(slot_id: int, adapter: PackedAdapter) -> None:
        bind(slot_id, adapter)
        if adapter.digest == "bad":
            raise MemoryError

    monkeypatch.setattr(world.bank, "bind", fail)
    world.request("a", digest="bad")
    world.request("b", digest="good")
    plan, _ = world.step()
    assert [row.request.request_id for row in plan.rows] == ["b"]
    (event,) = world.settle_loads()
    assert event.request_id == "a"
    assert event.error is not None
    assert event.error.code == "adapter_loading"
    assert world.residency.slots.find("bad") is None
    assert "bad" not in world.bank.bound.values()
    assert not world.residency.health.state()["failed"]["bad"]["is_final"]
    world.scheduler.check_integrity()
    world.residency.check_integrity()
