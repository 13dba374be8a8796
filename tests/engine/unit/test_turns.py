"""More adapters than slots: whose turn it is, and how long it can take."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from loraplex_engine.core.request import Request
from loraplex_engine.core.step import StepResult
from loraplex_engine.scheduling.turns import SlotSchedule
from loraplex_engine.wire.messages import SamplingParams
from schedules import World

LEASE_S = 1.0
STEP_S = 0.05


def _schedule(world: World) -> SlotSchedule:
    return world.scheduler.turns.describe(world.scheduler.waiting)


def _run(world: World, num_steps: int = 1) -> list[str]:
    """Steps of 50 ms; returns the requests that began, in order."""
    began = []
    for _ in range(num_steps):
        before = set(world.scheduler.running)
        began += [row.request.request_id for row in world.step()[0].rows if row.request not in before]
        world.clock.now += STEP_S
    return began


def _world(*digests: str, **settings: int) -> World:
    world = World(**{"num_blocks": 400, "budget": 400, "max_num_seqs": 16, "max_host": 64, **settings})  # type: ignore[arg-type]
    world.load(*digests)
    return world


def test_idle_slot_goes_to_whoever_needs_it_at_once() -> None:
    world = _world("a", "b", num_slots=1)
    world.request("a0", digest="a", max_tokens=1)
    world.request("b0", digest="b", max_tokens=1)
    assert _run(world, 2) == ["a0", "b0"]
    assert _schedule(world).forced_turns == 0


def test_requests_of_resident_adapters_and_of_the_base_run_past_those_that_wait() -> None:
    world = _world("a", "b", num_slots=1)
    world.request("a0", digest="a", max_tokens=8)
    _run(world)
    world.request("b0", digest="b")
    world.request("a1", digest="a")
    world.request("base")
    assert _run(world) == ["a1", "base"]


def test_requests_that_waited_for_the_same_adapter_start_together_in_order() -> None:
    world = _world("a", "b", num_slots=1)
    world.request("a0", digest="a", max_tokens=4)
    _run(world)
    for index in range(3):
        world.request(f"b{index}", digest="b")
        world.request(f"a{index + 1}", digest="a", max_tokens=2)
    _run(world, 3)
    assert _run(world) == ["b0", "b1", "b2"]
    assert world.residency.num_binds == 2


def test_busy_adapter_yields_after_the_lease_and_has_its_next_turn() -> None:
    world = _world("hot", "cold", num_slots=1)
    world.request("h0", digest="hot", max_tokens=10)
    _run(world)
    world.request("cold", digest="cold", max_tokens=2)
    began_at = {}
    for index in range(1, 120):
        world.request(f"h{index}", digest="hot", max_tokens=10)
        began_at |= dict.fromkeys(_run(world), index * STEP_S)
    assert LEASE_S <= began_at["cold"] <= LEASE_S + 10 * STEP_S + 2 * STEP_S
    assert _schedule(world).forced_turns == 1
    next_hot = min(at for name, at in began_at.items() if name != "cold" and at > began_at["cold"])
    assert next_hot - began_at["cold"] <= 3 * STEP_S


def test_adapter_with_waiting_requests_keeps_an_idle_slot_only_for_its_lease() -> None:
    world = _world("a", "b", num_slots=1, max_num_seqs=1)
    world.request("a0", digest="a", max_tokens=2)
    _run(world)
    world.request("b0", digest="b", max_tokens=2)
    for index in range(1, 40):
        world.request(f"a{index}", digest="a", max_tokens=2)
    began = _run(world, 60)
    assert began[:3] == ["a1", "a2", "a3"]
    assert "b0" in began
    assert began.index("b0") * 2 * STEP_S <= LEASE_S + 2 * STEP_S


def test_slot_that_an_operator_keeps_never_yields() -> None:
    world = _world("kept", "b", num_slots=1)
    world.request("k0", digest="kept", max_tokens=4)
    _run(world)
    world.residency.keep("kept", is_kept=True)
    world.request("b0", digest="b")
    assert _run(world, 100) == []
    assert _schedule(world).waiting_adapters == 1
    world.residency.keep("kept", is_kept=False)
    assert _run(world) == ["b0"]


def test_preempted_request_returns_to_a_slot_that_yields() -> None:
    world = _world("a", "b", num_slots=1, num_blocks=9)
    world.request("old", [1] * 7, "a", max_tokens=20)
    world.request("middle", [2] * 7, "a", max_tokens=8)
    young = world.request("young", [3] * 7, "a", max_tokens=8)
    _run(world)
    world.request("b0", digest="b", max_tokens=1)
    _run(world)
    world.clock.now += 2 * LEASE_S
    world.request("new", digest="a", max_tokens=1)
    began = _run(world, 10)
    assert (young.preemptions, began) == (1, ["young"])
    assert _schedule(world).yielding_adapters == 1
    assert _run(world, 30) == ["b0", "new"]


def test_state_says_how_the_slots_are_shared() -> None:
    world = _world("a", "b", "c", num_slots=2)
    world.request("a0", digest="a", max_tokens=40)
    world.request("b0", digest="b", max_tokens=40)
    _run(world)
    assert (_schedule(world).mode, _schedule(world).working_set) == ("resident", 2)
    world.request("c0", digest="c")
    _run(world, 10)
    state = _schedule(world)
    assert (state.mode, state.working_set, state.waiting_adapters, state.slots) == ("turns", 3, 1, 2)
    assert state.oldest_wait_s == pytest.approx(10 * STEP_S)
    assert state.lease_s == LEASE_S
    assert state.bound_s == pytest.approx(state.load_s + state.lease_s + state.request_s)
    _run(world, 60)
    assert _schedule(world).request_s == pytest.approx(40 * STEP_S, abs=2 * STEP_S)
    world.clock.now += 20
    assert (_schedule(world).mode, _schedule(world).working_set) == ("resident", 0)


def test_log_says_once_that_adapters_take_turns_and_how_long_one_waits(caplog: pytest.LogCaptureFixture) -> None:
    world = _world("a", "b", num_slots=1)
    with caplog.at_level(logging.INFO):
        for digest in "abab":
            world.request(f"{digest}{len(world.scheduler.waiting)}", digest=digest)
        _run(world, 5)
        world.clock.now += 20
        _run(world, 2)
    assert [record.message for record in caplog.records] == [
        "2 adapters for 1 slots take turns; longest wait by the requests of late: 1.0 s, of which the lease is 1.0 s",
        "1 adapters for 1 slots fit; longest wait by the requests of late: 1.1 s, of which the lease is 1.0 s",
    ]


def test_lease_grows_with_what_a_load_costs() -> None:
    world = _world("a", num_slots=4)
    bind = world.bank.bind

    def bind_slowly(*args: object) -> None:
        world.clock.now += 0.05
        bind(*args)  # type: ignore[arg-type]

    world.bank.bind = bind_slowly  # type: ignore[method-assign, assignment]
    world.request("a0", digest="a")
    _run(world)
    assert _schedule(world).lease_s == pytest.approx(4 * 0.05 / 0.1)


@settings(max_examples=examples(10), deadline=None)
@given(
    num_adapters=st.integers(2, 9),
    num_slots=st.integers(1, 3),
    max_tokens=st.integers(1, 12),
    rate=st.floats(0.2, 3.0),
    seed=st.integers(0, 1000),
)
def test_no_wait_for_a_slot_is_longer_than_the_bound(
    num_adapters: int, num_slots: int, max_tokens: int, rate: float, seed: int
) -> None:
    digests = [f"d{index}" for index in range(num_adapters)]
    world = _world(*digests, num_slots=num_slots, max_num_seqs=1000, budget=4000, num_blocks=300)
    chance = random.Random(seed)
    requests: list[Request] = []
    for _ in range(300):
        for _ in range(int(rate) + (chance.random() < rate % 1)):
            digest = digests[min(int(chance.expovariate(0.7)), num_adapters - 1)]
            requests.append(world.request(str(len(requests)), digest=digest, max_tokens=chance.randint(1, max_tokens)))
        _run(world)
    waits = [_wait_s(request, world.clock.now) for request in requests]
    rounds = -(-num_adapters // num_slots)
    # a step more at each end of a turn, because changes are seen between steps only
    assert max(waits, default=0.0) <= rounds * (LEASE_S + (max_tokens + 2) * STEP_S)


def _wait_s(request: Request, now: float) -> float:
    return (now if request.started_at is None else request.started_at) - request.arrived_at


@pytest.mark.endure
def test_sixteen_adapters_in_eight_slots_at_half_the_capacity_hardly_wait(
    long: Callable[[float, float], float],
) -> None:
    p95 = {num: _simulate_p95(num, long(90.0, 180.0)) for num in (8, 16)}
    assert p95[16] <= 3 * p95[8]


def _simulate_p95(num_adapters: int, duration_s: float) -> float:
    """95th percentile of the time to the first token, s: 128 tokens in, 64 out, 2.4 requests a second."""
    world = World(num_blocks=4000, num_slots=8, budget=512, max_num_seqs=16, max_host=32, max_model_len=192)
    digests = [f"d{index}" for index in range(num_adapters)]
    world.load(*digests)
    chance = random.Random(1)
    start, arrives_at, requests = world.clock.now, world.clock.now, list[Request]()
    while world.clock.now < start + duration_s:
        while arrives_at <= world.clock.now:
            ids = [chance.randrange(1, 40000) for _ in range(128)]
            request = Request(str(len(requests)), ids, SamplingParams(64, ignore_eos=True), chance.choice(digests))
            world.scheduler.add(request)
            requests.append(request)
            arrives_at += chance.expovariate(2.4)
        plan = world.scheduler.schedule()
        sampled = {row.request.request_id: 7 for row in plan.rows if row.samples}
        # as measured on two cores: a step costs its rows and the tokens of its prompts
        world.clock.now += 0.018 + 0.0015 * len(plan.rows) + 0.00045 * plan.num_tokens
        world.scheduler.update(plan, StepResult(sampled))
    waits = sorted(r.first_token_at - r.arrived_at for r in requests if r.first_token_at is not None)
    return waits[int(0.95 * len(waits))]
