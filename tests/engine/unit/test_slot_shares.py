"""More adapters than slots, wanted by several tenants: whose slots are guarded, and how long each can wait."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from fair_world import FairWorld, Tenant, percentile
from loraplex_engine.core.request import Request
from loraplex_engine.lora.residency import MAX_ON_THE_WAY
from loraplex_engine.scheduling.fair import VirtualTokens
from loraplex_engine.scheduling.slot_shares import GUARD_S
from schedules import Clock, World

_LEASE_S = 1.0
_STEP_S = 0.05
_LIGHT = tuple(f"l{index}" for index in range(7))


def _world(*digests: str, num_slots: int) -> World:
    clock = Clock()
    world = World(4000, num_slots, 4000, 1000, 64, share=VirtualTokens(clock), clock=clock, queue_timeout_s=600.0)
    world.load(*digests)
    return world


def _run(world: World, seconds: float) -> list[str]:
    """Steps of 50 ms; returns the requests that began, in order."""
    began = []
    for _ in range(round(seconds / _STEP_S)):
        before = set(world.scheduler.running)
        began += [row.request.request_id for row in world.step()[0].rows if row.request not in before]
        world.clock.now += _STEP_S
    return began


def test_idle_slot_of_a_tenant_within_its_share_waits_for_it_a_while() -> None:
    world = _world("a", "h0", "h1", num_slots=2)
    world.request("a", digest="a", tenant="a", max_tokens=1)
    world.request("h0", digest="h0", tenant="h", max_tokens=40)
    _run(world, 0.2)
    world.request("h1", digest="h1", tenant="h", max_tokens=40)
    assert _run(world, GUARD_S - 0.3) == []
    assert _run(world, 0.3) == ["h1"]


def test_tenant_beyond_its_share_yields_its_own_slots_to_its_own_adapters() -> None:
    world = _world("a", "h0", "h1", num_slots=2)
    world.request("a", digest="a", tenant="a", max_tokens=200, ignore_eos=True)
    world.request("h0", digest="h0", tenant="h", max_tokens=30, ignore_eos=True)
    _run(world, 0.1)
    world.request("h1", digest="h1", tenant="h", max_tokens=1)
    _run(world, _LEASE_S + 0.2)
    # h0 held its slot for the shorter time of the two, but a's is not for h
    world.request("late", digest="h0", tenant="h", max_tokens=1)
    world.request("a1", digest="a", tenant="a", max_tokens=1)
    assert _run(world, 1.0) == ["a1", "h1", "late"]


def test_tenant_without_a_slot_takes_one_of_whoever_has_more_than_its_share() -> None:
    world = _world("a", "h0", "h1", "h2", "b", num_slots=4)
    world.request("a", digest="a", tenant="a", max_tokens=100, ignore_eos=True)
    for digest in ("h0", "h1", "h2"):
        world.request(digest, digest=digest, tenant="h", max_tokens=50, ignore_eos=True)
    _run(world, 0.1)
    world.request("b", digest="b", tenant="b", max_tokens=1)
    _run(world, _LEASE_S + 0.1)
    for index, digest in enumerate(("a", "h0", "h1", "h2")):
        world.request(f"next {digest}", digest=digest, tenant=digest[0], max_tokens=1)
        assert _run(world, _STEP_S) == ([] if index == 1 else [f"next {digest}"])
    assert _run(world, 3.0) == ["b", "next h0"]


def test_load_of_a_tenant_is_not_behind_all_loads_of_another() -> None:
    world = _world(num_slots=8)
    for index in range(30):
        world.request(f"h{index}", digest=f"h{index}", tenant="h", max_tokens=1)
    world.step()
    world.request("a", digest="a", tenant="a", max_tokens=1)
    assert "a" not in world.loader.started
    assert len(world.loader.started) == MAX_ON_THE_WAY
    world.loader.finish(world.loader.started[0])
    world.settle_loads()
    world.step()
    assert world.loader.started[-1] == "a"


@pytest.mark.endure
def test_flood_of_adapters_does_not_move_the_first_tokens_of_tenants_with_one(
    long: Callable[[float, float], float],
) -> None:
    p95_s = {}
    for kind in ("calm", "flood", "unfair"):
        light = [Tenant(name, 2, digests=[name], think_s=0.3) for name in _LIGHT]
        last = Tenant("l7", 2, digests=["l7"], think_s=0.3)
        heavy = Tenant("heavy", 20, digests=[f"h{index}" for index in range(10)])
        world = FairWorld([*light, last if kind == "calm" else heavy], is_fair=kind != "unfair")
        records = world.run(long(30.0, 60.0), warm_s=10.0)
        p95_s[kind] = percentile([ttft_s for name in _LIGHT for ttft_s in records[name].ttfts_s], 95)
    assert p95_s["flood"] <= 1.5 * p95_s["calm"]
    assert p95_s["unfair"] > 3 * p95_s["calm"]


@settings(max_examples=examples(5), deadline=None)
@given(num_slots=st.integers(2, 4), max_tokens=st.integers(1, 12), seed=st.integers(0, 1000), rate=st.floats(0.2, 3.0))
def test_no_tenant_waits_longer_for_a_slot_than_its_share_says(
    num_slots: int, max_tokens: int, seed: int, rate: float
) -> None:
    chance = random.Random(seed)
    tenant_to_digests = {tenant: [f"{tenant}{i}" for i in range(chance.randint(1, 5))] for tenant in "abc"[:num_slots]}
    world = _world(*(digest for digests in tenant_to_digests.values() for digest in digests), num_slots=num_slots)
    requests: list[Request] = []
    for _ in range(300):
        for _ in range(int(rate) + (chance.random() < rate % 1)):
            tenant = chance.choice([*tenant_to_digests])
            digest = chance.choice(tenant_to_digests[tenant])
            requests.append(
                world.request(str(len(requests)), 4, digest, chance.randint(1, max_tokens), tenant, ignore_eos=True)
            )
        _run(world, _STEP_S)
    turn_s = _LEASE_S + (max_tokens + 2) * _STEP_S
    for request in requests:
        wait_s = (world.clock.now if request.started_at is None else request.started_at) - request.arrived_at
        rounds = -(-len(tenant_to_digests[request.tenant_id]) // (num_slots // len(tenant_to_digests)))
        assert wait_s <= rounds * turn_s + GUARD_S + 2 * _STEP_S, (request.request_id, tenant_to_digests)
