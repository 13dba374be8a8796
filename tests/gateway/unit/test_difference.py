"""Where the fleet is not as it should be is a pure function of what is wanted and what replicas say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

from loraplex.fleet.desired import BrokenAlias, Content, Desired, Naming, PinGoal, assign_pins
from loraplex.fleet.difference import KINDS, Difference, Repair, find_differences
from loraplex.fleet.view import FailedLoad, FleetView, HarmfulAdapter, Replica


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


A, B, C = map(digest, "abc")


def replica(
    url: str, resident: Collection[str] = (), *, pinned: Collection[str] = (), num_slots: int = 4, **changes: Any
) -> Replica:
    held = [*pinned, *resident]
    slots = [{"digest": one, "keep": one in pinned} for one in held]
    slots += [{"digest": None, "keep": False}] * (num_slots - len(held))
    fields: dict[str, Any] = {
        "url": url,
        "pool": "main",
        "base": "base",
        "problem": None,
        "resident": frozenset(held),
        "num_slots": num_slots,
        "state": {"is_ready": True, "slots": slots},
    }
    return Replica(**fields | changes)


def pin(*digests: str, copies: int | None = None, rank: int = 8, pool: str = "main") -> PinGoal:
    contents = tuple(Content(name=f"team-{one[7]}/default@1", digest=one, rank=rank) for one in digests)
    return PinGoal(pool=pool, model=f"team-{digests[0][7]}", copies=copies, contents=contents)


def find(
    *replicas: Replica,
    goals: Collection[PinGoal] = (),
    broken: Collection[BrokenAlias] = (),
    naming: Mapping[str, Naming] | None = None,
    is_due: bool = True,
) -> list[Difference]:
    known = naming or {}
    desired = Desired(
        goals=tuple(goals), broken=tuple(broken), find_naming=lambda _, one: known.get(one, Naming.CALLABLE)
    )
    found = find_differences(desired, FleetView(replicas), lambda *_: is_due)
    assert {one.kind for one in found} <= set(KINDS)
    assert len({one.key for one in found}) == len(found), "each is found once"
    return found


def facts(found: list[Difference]) -> list[tuple[str, str, str | None, Repair | None]]:
    return sorted((one.kind, one.url, one.digest, one.repair) for one in found)


def test_a_fleet_that_is_as_wanted_has_none() -> None:
    assert find(replica("a", [B], pinned=[A]), replica("b", pinned=[A]), goals=[pin(A)]) == []
    assert find() == []


def test_what_is_pinned_and_not_there_is_loaded_on_each_replica() -> None:
    found = find(replica("a", pinned=[A]), replica("b"), replica("c", [A]), goals=[pin(A)])
    assert facts(found) == [("adapter_missing", "b", A, Repair.LOAD), ("pin_missing", "c", A, Repair.PIN)]


def test_a_pin_that_nobody_wants_is_taken_away_and_the_adapter_stays() -> None:
    assert facts(find(replica("a", pinned=[A, B]), goals=[pin(B)])) == [("pin_extra", "a", A, Repair.UNPIN)]


def test_the_pin_moves_with_the_name() -> None:
    found = find(replica("a", pinned=[A]), goals=[pin(B)])
    assert facts(found) == [("adapter_missing", "a", B, Repair.LOAD), ("pin_extra", "a", A, Repair.UNPIN)]


@pytest.mark.parametrize("naming", [Naming.NAMELESS, Naming.RETIRED])
def test_what_no_name_means_is_dropped_once_its_time_is_over(naming: Naming) -> None:
    loaded = replica("a", [B], pinned=[A], in_memory=frozenset({A, B, C}))
    named = {A: naming, C: naming}
    expected = [("adapter_extra", "a", A, Repair.DROP), ("adapter_extra", "a", C, Repair.DROP)]
    assert facts(find(loaded, naming=named)) == expected
    assert find(loaded, naming=named, is_due=False) == []


def test_an_engine_that_claims_nonsense_is_believed_a_little_at_a_time() -> None:
    claimed = [f"sha256:{number:064d}" for number in range(1000)]
    found = find(replica("a", claimed, num_slots=0), naming=dict.fromkeys(claimed, Naming.NAMELESS))
    assert [one.digest for one in found] == claimed[:64]


def test_a_replica_without_traffic_is_only_told_of() -> None:
    down = replica("a", [A], problem="it cannot be reached", state={})
    refused = replica("b", [A], problem="it serves another model")
    found = find(down, refused, goals=[pin(A, copies=1)], naming={A: Naming.CALLABLE})
    assert facts(found) == [
        ("pin_unplaced", "", A, None),
        ("replica_down", "a", None, None),
        ("replica_refused", "b", None, None),
    ]
    assert found[1].actual == "it cannot be reached"


def test_a_copy_moves_from_a_dead_replica_to_another_and_back() -> None:
    goals = [pin(A, copies=1)]
    both = [replica("a"), replica("b")]
    (home,) = assign_pins(goals, FleetView(tuple(both))).url_to_contents
    other = "b" if home == "a" else "a"
    dead = replica(home, problem="it cannot be reached", state={})
    assert facts(find(dead, replica(other), goals=goals)) == [
        ("adapter_missing", other, A, Repair.LOAD),
        ("replica_down", home, None, None),
    ]
    assert facts(find(replica(home), replica(other, pinned=[A]), goals=goals)) == [
        ("adapter_missing", home, A, Repair.LOAD),
        ("pin_extra", other, A, Repair.UNPIN),
    ]


def test_one_slot_is_pinned_to_nothing_and_what_finds_no_place_is_told() -> None:
    small = replica("a", num_slots=2, pinned=[A])
    found = find(small, goals=[pin(A), pin(B)])
    assert facts(found) == [("pin_unplaced", "", B, None)]
    assert find(replica("a", num_slots=3, pinned=[A, B]), goals=[pin(A), pin(B)]) == []


def test_a_pin_goes_where_it_can_be() -> None:
    goals = [pin(A, copies=1, rank=32)]
    failed = FailedLoad(reason="r", code="c", attempts=5, is_content=True, is_final=True)
    unable = [
        replica("low", max_lora_rank=16),
        replica("harmed", quarantined={A: HarmfulAdapter(reason="nan", strikes=3)}),
        replica("failed", failed={A: failed}),
        replica("alien", pool="other"),
        replica("full", base="", model="team-x-full"),
    ]
    assert facts(find(*unable, replica("able"), goals=goals)) == [("adapter_missing", "able", A, Repair.LOAD)]


def test_a_replica_that_gave_up_tries_again_what_another_has_loaded() -> None:
    load = FailedLoad(reason="mismatch", code="c", attempts=5, is_content=True, is_final=True)
    hopeful = FailedLoad(reason="mismatch", code="c", attempts=4, is_content=True, is_final=False)
    gave_up, holder = replica("a", failed={A: load}), replica("b", [A])
    assert facts(find(gave_up, holder)) == [("load_given_up", "a", A, Repair.LOAD_AGAIN)]
    assert find(gave_up, replica("b")) == []
    assert find(gave_up, replica("b", [A], base="other")) == []
    assert find(replica("a", failed={A: hopeful}), holder) == []
    assert facts(find(gave_up, holder, naming={A: Naming.RETIRED}, is_due=False)) == []


def test_a_broken_alias_is_mended_and_a_pin_of_nothing_told() -> None:
    broken = BrokenAlias(tenant_id="t", tenant="team-x", adapter="default", alias="live", targets="3 (100 %)")
    ignored = PinGoal(pool="main", model="team-z", copies=None, problem="no such name")
    found = find(replica("a"), goals=[ignored], broken=[broken])
    assert [(one.kind, one.subject, one.repair) for one in found] == [
        ("pin_unknown", "main", None),
        ("alias_broken", "team-x/default@live", Repair.MEND_ALIAS),
    ]


def test_engines_of_a_full_model_are_asked_for_no_adapter() -> None:
    full = replica("a", [A], base="", model="team-x-full", in_memory=frozenset({A}))
    assert find(full, goals=[pin(B, pool="other")], naming={A: Naming.NAMELESS})[0].kind == "pin_unplaced"
    assert facts(find(full, naming={A: Naming.NAMELESS})) == []
