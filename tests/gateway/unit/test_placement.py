"""The choice of a replica is a pure function of what is known: residency, load within a bound, prefix, agreement."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_simulation import simulate
from loraplex.fleet.placement import (
    Outlook,
    Placement,
    Wish,
    count_homes,
    find_slack,
    order_homes,
    place,
)
from loraplex.fleet.view import FailedLoad, FleetView, HarmfulAdapter, Replica

DIGEST = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64
SLACK = 4


def replica(url: str, *, resident: tuple[str, ...] = (), load: int = 0, **changes: Any) -> Replica:
    """A replica whose load is this gateway's own, so that it is known exactly, unless `num_own` says otherwise."""
    fields: dict[str, Any] = {
        "url": url,
        "pool": "p",
        "base": "base",
        "problem": None,
        "resident": frozenset(resident),
        "num_running": load,
        "max_running": 16,
        "num_slots": 2,
    }
    return Replica(**{**fields, **changes})


def failing(url: str, **changes: Any) -> Replica:
    load = FailedLoad(reason="bad", code="c", attempts=5, is_content=True, is_final=True)
    return replica(url, failed={DIGEST: load}, **changes)


def harmed(url: str, **changes: Any) -> Replica:
    return replica(url, quarantined={DIGEST: HarmfulAdapter(reason="nan", strikes=3)}, **changes)


def find(*replicas: Replica, digest: str | None = DIGEST, exclude: tuple[str, ...] = (), **options: Any) -> Placement:
    found = try_find(*replicas, digest=digest, exclude=exclude, **options)
    assert found is not None
    return found


def try_find(
    *replicas: Replica, digest: str | None = DIGEST, exclude: tuple[str, ...] = (), **options: Any
) -> Placement | None:
    known = {name: options.pop(name) for name in ("in_flight", "arriving", "ejected") if name in options}
    wish = Wish(base="base", digest=digest, **options)
    return place(wish, FleetView(replicas), Outlook(**known), exclude)


def choose(*replicas: Replica, **options: Any) -> str | None:
    found = try_find(*replicas, **options)
    return None if found is None else found.replica.url


def test_residency_comes_before_load() -> None:
    busy = replica("b", resident=(DIGEST,), load=SLACK)
    assert find(replica("a"), busy) == Placement(busy, "resident")


def test_a_replica_beyond_its_bound_does_not_keep_its_adapter_alone() -> None:
    # the mean with this request is 10 of 2 replicas: 1.25 x 5 + 4 is the bound
    idle, busy = replica("a"), replica("b", resident=(DIGEST,), load=9)
    assert find(idle, replica("b", resident=(DIGEST,), load=10)).reason == "resident"
    busy = replica("b", resident=(DIGEST,), load=15)
    assert find(idle, busy) == Placement(idle, "spread")
    assert choose(idle, replica("b", resident=(DIGEST,), load=15, max_running=256)) == "b"


def test_those_that_are_all_beyond_their_bounds_have_the_least_beyond_it_chosen() -> None:
    idle = [failing(name) for name in "abc"]
    assert choose(*idle, replica("d", resident=(DIGEST,), load=100), replica("e", load=90)) == "e"
    assert choose(*idle, replica("d", resident=(DIGEST,), load=90), replica("e", load=100)) == "d"


def test_an_adapter_goes_where_its_rank_is_served() -> None:
    low, high = replica("low", max_lora_rank=64), replica("high", load=9, max_lora_rank=128)
    assert choose(low, high, rank=64) == "low"
    assert choose(low, high, rank=65) == "high"
    assert choose(low, high, rank=129) is None
    assert choose(low, replica("silent", load=9), rank=65) == "silent"


def test_what_was_compared_on_some_weights_goes_where_no_others_are() -> None:
    other, own = replica("other", resident=(DIGEST,), weights_digest="w2"), replica("own", load=9, weights_digest="w1")
    assert choose(other, own, weights="w1") == "own"
    assert choose(other, own) == "other"
    assert choose(other, own, digest=None) == "other"
    assert choose(other, weights="w1") is None
    assert choose(other, own, weights="w1", exclude=("own",)) is None
    assert choose(other, own, weights="w1", ejected=("own",)) == "own"
    assert choose(other, replica("silent", load=9), weights="w1") == "silent"


def test_equal_residency_goes_to_the_least_loaded() -> None:
    assert choose(replica("a", load=9), replica("b", load=1)) == "b"
    assert choose(replica("a", load=1), replica("b", resident=(DIGEST,)), digest=None) == "b"


def test_what_is_nowhere_goes_where_it_is_nearest() -> None:
    full = {"resident": (OTHER, "sha256:" + "c" * 64)}
    evicting, roomy = replica("evicting", **full), replica("roomy", load=1)
    near = replica("near", load=2, in_memory=frozenset({DIGEST}), **full)
    on_its_way = replica("on-its-way", load=3, loading=frozenset({DIGEST}))
    assert find(evicting).reason == "eviction"
    assert find(evicting, roomy) == Placement(roomy, "free_slot")
    assert find(evicting, roomy, near) == Placement(near, "in_memory")
    assert find(evicting, roomy, near, on_its_way) == Placement(on_its_way, "resident")


def test_a_second_request_follows_the_first_before_the_replica_has_told_of_it() -> None:
    assert choose(replica("a"), replica("b"), arriving={"b": {DIGEST}}, in_flight={"b": 1}) == "b"
    assert choose(replica("a"), failing("b"), arriving={"b": {DIGEST}}) == "a"
    for name, other in ("ab", "ba"):
        assert choose(replica(name, resident=(DIGEST,)), replica(other), arriving={other: {DIGEST}}) == name


def test_a_slot_that_an_arriving_adapter_takes_is_not_free() -> None:
    one_left = replica("a", resident=(OTHER,))
    assert find(one_left).reason == "free_slot"
    assert find(one_left, arriving={"a": {"sha256:" + "d" * 64}}).reason == "eviction"
    assert find(replica("a", resident=(OTHER,), loading=frozenset({"x"}))).reason == "eviction"


def test_adapters_are_spread_over_free_slots() -> None:
    roomy = replica("roomy", load=3, num_slots=4)
    assert choose(replica("a", num_slots=3), roomy, replica("b", num_slots=3)) == "roomy"


def test_requests_gather_on_as_many_replicas_as_the_adapter_has_homes() -> None:
    holders = [replica(name, resident=(DIGEST,)) for name in "abcd"]
    homes = [one.url for one in order_homes(DIGEST, holders)]
    assert {choose(*holders, draw=draw, prefix=str(draw)) for draw in range(40)} == {homes[0]}
    assert {choose(*holders, draw=draw, prefix=str(draw), num_homes=2) for draw in range(40)} == set(homes[:2])
    busy = [replica(name, resident=(DIGEST,), load=20 if name == homes[0] else 0) for name in "abcd"]
    found = find(*busy)
    assert (found.replica.url in homes[1:], found.reason) == (True, "resident")


def test_what_begins_alike_goes_to_the_same_replica_while_it_is_about_as_busy() -> None:
    names = "abcd"

    def ask(prefix: str, **loads: int) -> str | None:
        group = [replica(name, load=loads.get(name, 0)) for name in names]
        own = {name: loads.get(name, 0) for name in names}
        known = [Replica(**{**as_fields(one), "num_own": own[one.url]}) for one in group]
        return choose(*known, digest=None, prefix=prefix, in_flight=own)

    preferred = {prefix: str(ask(prefix)) for prefix in map(str, range(40))}
    assert set(preferred.values()) == set(names)
    for prefix, name in preferred.items():
        assert ask(prefix, **{name: SLACK // 2}) == name
        assert ask(prefix, **{name: SLACK // 2 + 1}) != name


def as_fields(one: Replica) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def test_of_stale_loads_the_less_of_two_drawn_is_taken_of_own_ones_the_least_of_all() -> None:
    own = [replica(f"e{load}", load=load, num_own=load) for load in range(4)]
    in_flight = {one.url: one.num_running for one in own}
    assert {choose(*own, digest=None, draw=draw, in_flight=in_flight) for draw in range(50)} == {"e0"}
    foreign = [replica(f"e{load}", load=load) for load in range(4)]
    assert {choose(*foreign, digest=None, draw=draw) for draw in range(50)} == {"e0", "e1", "e2"}


def test_a_quarantined_adapter_goes_where_it_is_well_or_is_refused_where_it_is_quarantined() -> None:
    well = replica("b", resident=(DIGEST,), load=90)
    assert find(harmed("a", resident=(DIGEST,)), well) == Placement(well, "resident")
    assert find(harmed("a", load=90), replica("b")).reason == "quarantined"
    assert choose(harmed("a"), replica("b"), exclude=("a",)) == "b"
    assert choose(harmed("a"), replica("b", load=1), digest=None) == "a"


def test_an_adapter_that_failed_to_load_goes_where_it_is_not_known() -> None:
    assert choose(failing("a"), replica("b", load=90)) == "b"
    assert choose(failing("a"), failing("b", load=9)) == "a"
    assert choose(failing("a"), replica("b", load=90, resident=(DIGEST,))) == "b"


def test_requests_in_flight_count_before_the_next_poll() -> None:
    assert choose(replica("a"), replica("b"), digest=None, in_flight={"a": 9}) == "b"
    seen = replica("a", load=9, num_own=9)
    assert choose(seen, replica("b", load=1), digest=None, in_flight={"a": 0}) == "a"


def test_only_able_replicas_of_the_base_are_chosen() -> None:
    down, other = replica("a", problem="it cannot be reached"), replica("b", base="other")
    full = replica("f", model="big", base="")
    assert choose(down, other, full) is None
    assert choose(down, other, full, replica("c"), exclude=("c",)) is None


def test_a_replica_that_is_not_trusted_is_taken_only_if_none_is() -> None:
    assert choose(replica("a", resident=(DIGEST,)), replica("b", load=90), ejected={"a"}) == "b"
    assert choose(replica("a"), ejected={"a"}) == "a"
    assert choose(replica("a"), replica("b"), ejected={"a", "b"}, exclude=("a",)) == "b"


def test_gateways_agree_on_a_cold_adapter_and_others_stay_when_a_replica_goes() -> None:
    fleet = [replica(f"http://e{index}", num_slots=99) for index in range(5)]
    digests = [f"sha256:{index:064x}" for index in range(200)]
    before = {digest: choose(*fleet, digest=digest, draw=1) for digest in digests}
    assert before == {digest: choose(*reversed(fleet), digest=digest, draw=2) for digest in digests}
    after = {digest: choose(*fleet[1:], digest=digest) for digest in digests}
    assert all(after[digest] == url for digest, url in before.items() if url != fleet[0].url)
    assert len({after[digest] for digest, url in before.items() if url == fleet[0].url}) == 4


@pytest.mark.parametrize(("share", "homes"), [(0.0, 1), (0.16, 1), (0.17, 2), (0.33, 2), (0.34, 3), (1.0, 3)])
def test_homes_follow_the_share_of_the_traffic(share: float, homes: int) -> None:
    assert count_homes(share, 3) == homes
    assert count_homes(share, 1) == 1


loads = st.lists(st.integers(0, 60), min_size=1, max_size=6)
holders = st.sets(st.integers(0, 5))


@given(loads, holders, st.sets(st.integers(0, 5)), st.integers(0, 2**32), st.integers(1, 6), st.sampled_from("xyz"))
def test_the_bound_holds_and_what_is_chosen_is_able(
    loads: list[int], held: set[int], ejected: set[int], draw: int, num_homes: int, prefix: str
) -> None:
    fleet = [
        replica(f"e{index}", load=load, resident=(DIGEST,) if index in held else ()) for index, load in enumerate(loads)
    ]
    untrusted = {f"e{index}" for index in ejected}
    found = find(*fleet, ejected=untrusted, draw=draw, num_homes=num_homes, prefix=prefix)
    trusted = [one for one in fleet if one.url not in untrusted] or fleet
    assert found.replica in trusted
    bound = 1.25 * (sum(one.load for one in trusted) + 1) / len(trusted) + find_slack(found.replica)
    # at least one is below the mean, so below the bound
    assert found.replica.load < bound
    if found.reason == "spread":
        assert all(one.load >= bound for one in trusted if DIGEST in one.resident)


@pytest.mark.parametrize("num_gateways", [1, 3])
@pytest.mark.parametrize("num_clients", [16, 48])
def test_twenty_four_adapters_on_three_replicas_of_eight_slots(num_clients: int, num_gateways: int) -> None:
    options: dict[str, Any] = {"num_clients": num_clients, "num_requests": 2000, "has_prefixes": True}
    ours = simulate(1, num_gateways=num_gateways, **options)
    turns = simulate(1, takes_turns=True, **options)
    assert turns.loads_per_request > 0.2
    # what other gateways do is known a second late
    assert ours.loads_per_request < turns.loads_per_request / (5 if num_gateways == 1 else 3.5)
    assert ours.wait_s(95) <= turns.wait_s(95)
    assert min(ours.shares.values()) >= 0.18


def test_a_hot_adapter_spreads_and_each_replica_serves_its_part() -> None:
    result = simulate(2, hottest_share=0.7, num_clients=32, num_requests=2000)
    assert result.holders >= 2
    assert max(result.shares.values()) < 0.5
    assert result.loads_per_request < 0.05


def test_a_single_adapter_is_served_by_all() -> None:
    result = simulate(3, num_adapters=1, num_clients=48, num_requests=1000)
    assert result.holders == 3
    assert min(result.shares.values()) >= 0.2
    assert result.loads_per_request == pytest.approx(3 / 1000)


def test_draws_are_spread_over_all_pairs() -> None:
    generator = random.Random(4)
    fleet = [replica(f"e{index}", load=5) for index in range(5)]
    found = {choose(*fleet, digest=None, draw=generator.getrandbits(32)) for _ in range(200)}
    assert len(found) == 4


def test_a_replica_that_was_away_gets_its_part_again() -> None:
    for num_adapters in (6, 24):
        result = simulate(5, num_adapters=num_adapters, num_clients=32, num_requests=2400, outage=(15.0, 25.0))
        assert min(result.last_shares.values()) >= 0.18
        assert result.loads_per_request < 0.1
