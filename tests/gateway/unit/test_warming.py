"""Loads ahead: copies of what is hot, what a replica that came back may expect, and never at others' cost."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway_world import until
from loraplex.fleet.placement import Outlook, order_homes
from loraplex.fleet.traffic import Demand
from loraplex.fleet.view import FailedLoad, FleetView, HarmfulAdapter, Replica
from loraplex.fleet.warming import MAX_LOADS, Load, Warmer, plan_loads


def replica(url: str, *resident: str, num_slots: int = 2, **changes: Any) -> Replica:
    fields: dict[str, Any] = {"pool": "p", "base": "base", "problem": None}
    return Replica(**{**fields, "url": url, "resident": frozenset(resident), "num_slots": num_slots, **changes})


def plan(
    *replicas: Replica, counts: dict[str, float], rank: int = 8, outlook: Outlook | None = None
) -> set[tuple[str, str]]:
    total = sum(counts.values())
    demands = sorted((Demand(digest, rank, count) for digest, count in counts.items()), key=lambda one: -one.count)
    shares = {digest: count / total for digest, count in counts.items()}
    loads = plan_loads("base", FleetView(replicas), demands, shares, outlook or Outlook())
    assert len(loads) == len(set(loads))
    return {(load.url, load.digest) for load in loads}


MANY = {f"d{index}": 10.0 for index in range(6)}


def test_a_replica_that_came_back_gets_what_nobody_holds_the_most_wanted_first() -> None:
    fleet = (replica("a", "d0", "d1"), replica("b", "d2", "d3"), replica("back"))
    assert plan(*fleet, counts=MANY) == {("back", "d4"), ("back", "d5")}
    assert plan(*fleet, counts={**MANY, "d6": 11.0, "d4": 1.0}) == {("back", "d6"), ("back", "d5")}
    assert plan(replica("a", "d0", "d1"), replica("b", "d2", "d3"), counts=MANY) == set()


def test_a_version_is_loaded_ahead_only_where_its_weights_are() -> None:
    view = FleetView((replica("other", weights_digest="w2"), replica("own", weights_digest="w1")))
    bound = [Demand(digest, 8, 10.0, "w1") for digest in ("d0", "d1", "d2")]
    loads = plan_loads("base", view, bound, {}, Outlook())
    assert loads == [Load("own", "d0"), Load("own", "d1")]
    free = [Demand(digest, 8, 10.0) for digest in ("d0", "d1", "d2")]
    assert {load.url for load in plan_loads("base", view, free, {}, Outlook())} == {"other", "own"}


def test_what_is_served_no_more_is_not_loaded_and_stands_in_nobodys_way() -> None:
    demands = [Demand(digest, 8, count) for digest, count in MANY.items()]
    asked: list[str] = []

    def may_load(digest: str) -> bool:
        asked.append(digest)
        return digest in ("d2", "d4")

    view = FleetView((replica("a", "d0", "d1", num_slots=4),))
    loads = plan_loads("base", view, demands, {}, Outlook(), may_load)
    assert loads == [Load("a", "d2"), Load("a", "d4")]
    assert "d0" not in asked


def test_a_replica_that_came_takes_over_its_part_and_no_more() -> None:
    counts = {f"d{index}": 10.0 for index in range(12)}
    old = [replica(name, *list(counts)[index::2], num_slots=8) for index, name in enumerate("ab")]
    new = replica("new", num_slots=8)
    moved = plan(*old, new, counts=counts)
    assert {url for url, _ in moved} == {"new"}
    assert 3 <= len(moved) <= 4
    for _, digest in moved:
        (holder,) = [one for one in old if digest in one.resident]
        assert order_homes(digest, [holder, new])[0] is new
    assert plan(*old, replica("new", *(digest for _, digest in moved), num_slots=8), counts=counts) == set()
    assert plan(*old, replica("full", "x", num_slots=1), counts=counts) == set()
    assert plan(*old, new, counts=dict.fromkeys(counts, 0.5)) == set()
    assert plan(*old, replica("new", num_slots=8, max_lora_rank=4), counts=counts) == set()


def test_the_rest_of_thousands_of_adapters_costs_nothing() -> None:
    demands = [Demand(f"d{index}", 8, 10_000.0 - index) for index in range(5000)]
    asked: list[str] = []

    def may_load(digest: str) -> bool:
        asked.append(digest)
        return True

    full = FleetView((replica("a", "d0", "d1"), replica("b", "d2", "d3")))
    assert plan_loads("base", full, demands, {}, Outlook(), may_load) == []
    assert asked == []
    roomy = FleetView((replica("a", "d0", "d1"), replica("b", "d2")))
    assert plan_loads("base", roomy, demands, {}, Outlook(), may_load) == [Load("b", "d3")]
    assert asked == ["d3"]


def test_what_is_held_or_on_its_way_is_not_loaded_again() -> None:
    back = replica("back", loading=frozenset({"d4"}))
    fleet = (replica("a", "d0", "d1"), replica("b", "d2", "d3"), back)
    assert plan(*fleet, counts=MANY) == {("back", "d5")}
    sent = Outlook(arriving={"back": {"d5": 1.0}})
    assert plan(*fleet, counts=MANY, outlook=sent) == set()


def test_a_hot_adapter_is_copied_over_what_is_asked_for_much_less() -> None:
    counts = {"hot": 100.0, **{f"d{index}": 15.0 for index in range(5)}}
    fleet = (replica("a", "hot", "d0"), replica("b", "d1", "d2"), replica("c", "d3", "d4"))
    copies = plan(*fleet, counts=counts)
    assert copies == {("b", "hot"), ("c", "hot")}
    close = {"hot": 100.0, **{f"d{index}": 60.0 for index in range(5)}}
    assert plan(*fleet, counts=close) == set()


def test_there_is_no_copy_of_what_one_replica_can_carry() -> None:
    fleet = (replica("a", "d0", "d1"), replica("b", "d2", "d3"), replica("c", "d4", "d5"))
    assert plan(*fleet, counts=MANY) == set()
    assert plan(replica("a", "d0", num_slots=8), replica("b", num_slots=8), counts={"d0": 1.0}) == {("b", "d0")}


def test_a_load_goes_only_where_it_is_wanted() -> None:
    failed = FailedLoad(reason="r", code="c", attempts=1, is_content=False, is_final=False)
    counts = {"d0": 9.0}
    assert plan(replica("a", max_lora_rank=4), counts=counts) == set()
    assert plan(replica("a", failed={"d0": failed}), counts=counts) == set()
    assert plan(
        replica("a"), replica("b", quarantined={"d0": HarmfulAdapter(reason="r", strikes=3)}), counts=counts
    ) == (set())
    assert plan(replica("a", problem="it is draining"), counts=counts) == set()
    assert plan(replica("a", model="big", base=""), counts=counts) == set()
    assert plan(replica("a"), counts=counts, outlook=Outlook(ejected={"a"})) == set()
    assert plan(replica("a", num_slots=0), counts=counts) == set()
    assert plan(replica("a"), counts=counts) == {("a", "d0")}


def test_a_replica_gets_some_loads_at_a_time() -> None:
    counts = {f"d{index}": 1.0 for index in range(50)}
    assert len(plan(replica("a", num_slots=64), counts=counts)) == MAX_LOADS


async def test_loads_are_begun_once_and_failed_ones_left_alone_for_a_while() -> None:
    now, asked, may_end = [0.0], [], asyncio.Event()

    async def load(url: str, digest: str) -> str | None:
        asked.append((url, digest))
        await may_end.wait()
        return None if digest == "good" else "no room"

    warmer = Warmer(load, lambda: now[0])
    wanted = [Load("a", "good"), Load("a", "bad")]
    warmer.begin(wanted)
    await asyncio.sleep(0)
    warmer.begin([*wanted, *(Load("a", str(index)) for index in range(9))])
    await asyncio.sleep(0)
    assert len(asked) == MAX_LOADS
    may_end.set()
    await until(lambda: not warmer.num_running)
    assert warmer.num_loads == 1
    warmer.begin(wanted)
    assert warmer.num_running == 0
    now[0] += 61.0
    warmer.begin(wanted)
    assert warmer.num_running == 2
    await warmer.stop()


def test_an_adapter_does_not_move_if_that_only_moves_the_crowd() -> None:
    giver, new = replica("giver", num_slots=4), replica("new", num_slots=4)
    digest = next(name for name in map(str, range(99)) if order_homes(name, [giver, new])[0] is new)
    view = FleetView((replica("giver", digest, num_slots=4), new))
    assert plan_loads("base", view, [Demand(digest, 8, 30.0)], {}, Outlook()) == []
    others = [Demand(f"other-{index}", 8, 30.0) for index in range(3)]
    held = replica("giver", digest, *(one.digest for one in others), num_slots=4)
    moved = plan_loads("base", FleetView((held, new)), [Demand(digest, 8, 30.0), *others], {}, Outlook())
    assert Load("new", digest) in moved
