"""Tenants share the engine by weighted virtual tokens: who has the next turn, what counts, who yields."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from fair_world import FairWorld, Tenant, jain, percentile
from loraplex_engine.core.request import Request
from loraplex_engine.errors import QueueFullError
from loraplex_engine.scheduling.fair import AGE_S, CREDIT, LOAD_BYTES_PER_TOKEN, PRIORITY_TOKENS, VirtualTokens
from loraplex_engine.scheduling.policy import MAX_PRIORITY
from loraplex_engine.wire.messages import SamplingParams
from schedules import Clock, World

_LIGHT = tuple(f"l{index}" for index in range(7))
_STEP_S = 0.02


def _world(**settings: int) -> tuple[World, VirtualTokens]:
    clock = Clock()
    share = VirtualTokens(clock)
    world = World(**{"num_blocks": 400, "budget": 400, **settings}, share=share, clock=clock)  # type: ignore[arg-type]
    return world, share


def _request(
    name: str, tenant: str, arrival: int, *, tokens: int = 100, weight: float = 1, priority: int = 0
) -> Request:
    params = SamplingParams(1)
    return Request(name, [1] * tokens, params, None, tenant, priority, arrival=arrival, weight=weight, arrived_at=0.0)


def _serve(share: VirtualTokens, request: Request) -> None:
    share.note_start(request, 0)
    share.note_computed(request, len(request.prompt_ids))


def _leads(world: World, share: VirtualTokens) -> dict[str, float]:
    scheduler = world.scheduler
    return {standing.tenant: standing.lead for standing in share.describe(scheduler.waiting, scheduler.running)}


def _begin(world: World, num_steps: int = 1) -> list[str]:
    """Requests that began, in order."""
    began = []
    for _ in range(num_steps):
        before = set(world.scheduler.running)
        began += [row.request.request_id for row in world.step()[0].rows if row.request not in before]
        world.clock.now += _STEP_S
    return began


# turns


def test_tenants_take_turns_however_many_requests_one_of_them_sends() -> None:
    world, _ = _world(max_num_seqs=1)
    for index in range(4):
        world.request(f"a{index}", [index + 1] * 8, tenant="a", max_tokens=1)
    world.request("b0", [21] * 8, tenant="b", max_tokens=1)
    world.request("c0", [22] * 8, tenant="c", max_tokens=1)
    assert _begin(world, 6) == ["a0", "b0", "c0", "a1", "a2", "a3"]


def test_requests_that_start_in_one_step_are_those_of_many_tenants() -> None:
    world, _ = _world(max_num_seqs=4)
    for index in range(4):
        world.request(f"a{index}", [index + 1] * 8, tenant="a")
    for tenant in "bc":
        world.request(f"{tenant}0", [ord(tenant)] * 8, tenant=tenant)
    assert _begin(world) == ["a0", "b0", "c0", "a1"]


def test_weights_are_the_shares_of_the_tokens() -> None:
    share = VirtualTokens(lambda: 0.0)
    weights = {"a": 1, "b": 2, "c": 5}
    line = [
        _request(f"{tenant}{index}", tenant, index * 3 + place, weight=weight)
        for index in range(100)
        for place, (tenant, weight) in enumerate(weights.items())
    ]
    served: Counter[str] = Counter()
    for _ in range(80):
        first = share.arrange(line)[0]
        _serve(share, first)
        line.remove(first)
        served[first.tenant_id] += 1
    assert all(abs(served[tenant] - 10 * weight) <= 1 for tenant, weight in weights.items())


def test_a_priority_orders_a_tenants_own_requests_and_moves_a_bounded_service_towards_others() -> None:
    share = VirtualTokens(lambda: 0.0)
    urgent = [_request(f"u{i}", "u", i, priority=-(10**9), tokens=128) for i in range(200)]
    others = [_request(f"o{i}", "o", 1000 + i, tokens=128) for i in range(200)]
    line, served = [*urgent, *others], []
    for _ in range(100):
        first = share.arrange(line)[0]
        _serve(share, first)
        line.remove(first)
        served.append(first.tenant_id)
    most_ahead = MAX_PRIORITY * PRIORITY_TOKENS / 128
    assert served[: int(most_ahead)] == ["u"] * int(most_ahead)
    assert abs(served.count("u") - served.count("o") - most_ahead) <= 1


def test_tenant_far_ahead_has_its_next_turn_once_it_has_waited_long_enough() -> None:
    clock = Clock()
    share = VirtualTokens(clock)
    whale = _request("whale", "w", 0, tokens=1_000_000)
    others = [_request(f"o{i}", "o", 1 + i, weight=1000) for i in range(400)]
    share.arrange([whale, *others])
    _serve(share, whale)
    began_at = clock.now
    line = [*others, _request("next", "w", 1000, tokens=10)]
    while (first := share.arrange(line)[0]).tenant_id == "o":
        _serve(share, first)
        line.remove(first)
        clock.now += 0.05
    assert 0.9 * AGE_S < clock.now - began_at <= AGE_S + 0.1


def test_line_of_one_tenant_stays_as_it_is() -> None:
    share = VirtualTokens(lambda: 1.0)
    line = [_request(str(index), "a", index, priority=index % 3) for index in range(9)]
    assert share.arrange(line) is line
    mixed = [*line, _request("b", "b", 10)]
    assert [request for request in share.arrange(mixed) if request.tenant_id == "a"] == line


def test_one_tenant_alone_is_served_as_if_there_were_no_shares() -> None:
    records = []
    for is_fair in (True, False):
        tenant = Tenant("only", 30, digests=[f"d{index}" for index in range(10)])
        records.append(FairWorld([tenant], is_fair=is_fair).run(20.0)["only"])
    assert records[0] == records[1]


def test_who_was_away_saves_up_a_credit_and_no_more() -> None:
    share = VirtualTokens(lambda: 0.0)
    _serve(share, share.arrange([_request("b", "b", 0)])[0])
    busy = [_request(f"a{i}", "a", 1 + i, tokens=1000) for i in range(200)]
    for request in busy[:100]:
        share.arrange(busy)
        _serve(share, request)
        busy = busy[1:]
    back = [_request(f"b{i}", "b", 1000 + i, tokens=100) for i in range(100)]
    line, before = [*busy, *back], 0
    while (first := share.arrange(line)[0]).tenant_id == "b":
        _serve(share, first)
        line.remove(first)
        before += 100
    assert CREDIT <= before <= CREDIT + 1200


def test_newcomer_starts_where_the_others_are() -> None:
    share = VirtualTokens(lambda: 0.0)
    line = [_request(f"a{i}", "a", i) for i in range(60)]
    for _ in range(50):
        _serve(share, share.arrange(line)[0])
        del line[0]
    line += [_request(f"b{i}", "b", 100 + i) for i in range(60)]
    served = []
    for _ in range(10):
        served.append(share.arrange(line)[0])
        _serve(share, served[-1])
        line.remove(served[-1])
    assert Counter(request.tenant_id for request in served) == {"a": 5, "b": 5}


def test_tenant_that_used_what_nobody_wanted_does_not_pay_for_it() -> None:
    world, share = _world(max_num_seqs=1)
    for index in range(50):
        world.request(f"a{index}", [index + 1] * 8, tenant="a", max_tokens=1)
    _begin(world, 40)
    world.request("b", [900] * 8, tenant="b", max_tokens=1)
    _begin(world)
    assert _leads(world, share)["a"] <= CREDIT


# what counts


def test_counter_grows_by_prompt_and_sampled_tokens_and_a_tenth_of_cached_ones_over_the_weight() -> None:
    world, share = _world(budget=64)
    prompt = list(range(1, 33))
    for weight in (1, 2):
        tenant = f"t{weight}"
        for _ in range(2):
            before = _served(share, tenant)
            world.request(f"{tenant}-{before}", prompt, tenant=tenant, max_tokens=5, weight=weight)
            while world.scheduler.running or world.scheduler.waiting:
                world.step()
        cached = 31  # all but the token whose logits are needed
        assert _served(share, tenant) - before == pytest.approx((32 - cached + 0.1 * cached + 5) / weight)


def _served(share: VirtualTokens, tenant: str) -> float:
    account = share._tenant_to_account.get(tenant)
    return 0.0 if account is None else account.served


def test_tokens_that_are_computed_again_are_not_charged_again() -> None:
    world, share = _world(num_blocks=4, budget=32)
    world.request("old", [1, 2, 3, 4, 5, 6, 7], max_tokens=9, tenant="t")
    world.request("young", [11, 12, 13, 14, 15, 16, 17], max_tokens=9, tenant="t")
    before = _served(share, "t")
    while world.scheduler.running or world.scheduler.waiting:
        world.step()
    assert world.scheduler.num_preemptions
    assert _served(share, "t") - before == pytest.approx(2 * (7 + 9))


def test_adapter_that_is_put_into_a_slot_counts_by_its_bytes() -> None:
    world, share = _world(num_slots=1)
    world.load("a")
    counts = []
    for name in ("loads", "finds it there"):
        before = _served(share, "t")
        world.request(name, [1, 2, 3], digest="a", tenant="t", max_tokens=1)
        world.step()
        counts.append(_served(share, "t") - before)
    assert counts[0] == pytest.approx(4 + 64 / LOAD_BYTES_PER_TOKEN)
    assert counts[1] < 4


def test_long_prompt_that_is_being_computed_lets_a_short_one_of_another_tenant_by() -> None:
    world, _ = _world(num_blocks=2000, budget=64, max_model_len=4000)
    world.request("h", list(range(1, 2001)), tenant="h")
    world.step()
    world.step()
    world.request("l", [5000] * 8, tenant="l")
    plan, _ = world.step()
    assert [(row.request.request_id, row.num_tokens) for row in plan.rows] == [("l", 8), ("h", 56)]


# who yields


def test_tenant_below_its_share_takes_a_seat_of_one_above() -> None:
    world, _ = _world(max_num_seqs=4)
    heavy = [world.request(f"h{i}", [i + 1] * 8, tenant="h", max_tokens=40) for i in range(6)]
    assert _begin(world) == ["h0", "h1", "h2", "h3"]
    world.request("l0", [50] * 8, tenant="l", max_tokens=40)
    assert _begin(world) == ["l0"]
    assert [request in world.scheduler.running for request in heavy] == [True, True, True, False, False, False]
    world.request("l1", [51] * 8, tenant="l", max_tokens=40)
    world.request("l2", [52] * 8, tenant="l", max_tokens=40)
    assert _begin(world, 3) == ["l1"]
    assert (world.scheduler.num_yields, world.scheduler.num_preemptions) == (2, 0)
    assert [(s.tenant, s.waiting, s.running) for s in world.scheduler.describe_shares()] == [("h", 4, 2), ("l", 1, 2)]


def test_who_yielded_goes_on_where_it_was_once_there_is_a_seat() -> None:
    world, _ = _world(max_num_seqs=2)
    world.request("h0", [1] * 8, tenant="h", max_tokens=30, ignore_eos=True)
    young = world.request("h1", [2] * 8, tenant="h", max_tokens=30, ignore_eos=True)
    world.request("h2", [3] * 8, tenant="h", max_tokens=30, ignore_eos=True)
    _begin(world, 5)
    world.request("l", [9] * 8, tenant="l", max_tokens=3, ignore_eos=True)
    assert _begin(world) == ["l"]
    told = list(young.output_ids)
    assert _begin(world, 4) == ["h1"]
    assert young.output_ids[: len(told)] == told
    # all but what is left of a block was in the cache
    assert young.num_charged == 8


def test_seats_are_shared_by_weight() -> None:
    world, _ = _world(max_num_seqs=8)
    for index in range(10):
        world.request(f"h{index}", [index + 1] * 4, tenant="h", max_tokens=40)
    _begin(world)
    for index in range(10):
        world.request(f"l{index}", [50 + index] * 4, tenant="l", max_tokens=40, weight=3)
    _begin(world, 10)
    assert Counter(request.tenant_id for request in world.scheduler.running) == {"h": 2, "l": 6}


def test_tenant_that_had_more_tokens_takes_no_seat() -> None:
    world, share = _world(max_num_seqs=2, num_blocks=2000)
    world.request("h0", [1] * 8, tenant="h", max_tokens=40)
    world.request("h1", [2] * 8, tenant="h", max_tokens=40)
    _begin(world)
    share.note_load(_request("greedy", "l", 5), LOAD_BYTES_PER_TOKEN * 100_000)
    world.request("l", [9] * 8, tenant="l", max_tokens=1)
    assert _begin(world, 3) == []


def test_tenant_that_fills_the_cache_gives_blocks_to_one_that_needs_them() -> None:
    world, _ = _world(num_blocks=20, max_num_seqs=8)
    for index in range(4):
        world.request(f"h{index}", [index + 1] * 16, tenant="h", max_tokens=30)
    _begin(world)
    world.request("l", [9] * 16, tenant="l", max_tokens=3)
    assert _begin(world) == ["l"]


def test_each_tenant_has_a_seat_in_turn_when_there_are_more_tenants_than_seats() -> None:
    world, _ = _world(max_num_seqs=2, num_blocks=2000, max_model_len=4000)
    for tenant in "abc":
        world.request(tenant, [ord(tenant)] * 8, tenant=tenant, max_tokens=3000, ignore_eos=True)
    assert _begin(world, 10) == ["a", "b"]
    began = _begin(world, round(60 / _STEP_S))
    assert began[0] == "c"
    # each runs for some seconds before it yields, and none for long without
    assert 8 <= len(began) <= 24, began
    assert max(Counter(began).values()) - min(Counter(began).values()) <= 1


def test_requests_that_yielded_take_turns_with_others_of_their_tenant() -> None:
    world, _ = _world(max_num_seqs=4, num_blocks=4000, max_model_len=4000)
    for index in range(4):
        world.request(f"h{index}", [index + 1] * 8, tenant="h", max_tokens=2000, ignore_eos=True)
    _begin(world, 2)
    for index in range(3):
        world.request(f"l{index}", [50 + index] * 8, tenant="l", max_tokens=2000, weight=3, ignore_eos=True)
    began = _begin(world, int(20 / _STEP_S))
    waits = [Counter(began)[f"h{index}"] for index in range(4)]
    assert min(waits[1:]) >= 2, began


def test_full_queue_of_one_tenant_refuses_that_tenant_alone() -> None:
    world, _ = _world(max_num_seqs=1, max_waiting=8)
    world.request("running", [99], tenant="h")
    _begin(world)
    for index in range(8):
        world.request(f"h{index}", [index + 1], tenant="h")
    with pytest.raises(QueueFullError):
        world.request("h8", [1], tenant="h")
    for index in range(4):
        world.request(f"l{index}", [20 + index], tenant="l")
    with pytest.raises(QueueFullError):
        world.request("l4", [1], tenant="l")


def test_each_tenant_may_queue_one_request_however_many_tenants_there_are() -> None:
    world, _ = _world(max_num_seqs=1, max_waiting=2)
    for tenant in "abcde":
        world.request(tenant, [ord(tenant)], tenant=tenant)
    with pytest.raises(QueueFullError):
        world.request("a1", [1], tenant="a")
    assert len(world.scheduler.waiting) == 5


# what tenants feel


def _flood(duration_s: float, *, is_fair: bool, is_flooded: bool) -> dict[str, float]:
    """p95 of the light tenants' first tokens, and Jain's index."""
    eighth = Tenant("heavy", 20) if is_flooded else Tenant("l7", 2)
    world = FairWorld([*(Tenant(name, 2) for name in _LIGHT), eighth], is_fair=is_fair)
    records = world.run(duration_s, warm_s=10.0)
    ttfts_s = [ttft_s for name in _LIGHT for ttft_s in records[name].ttfts_s]
    return {"p95": percentile(ttfts_s, 95), "jain": jain([record.tokens for record in records.values()])}


@pytest.mark.endure
def test_flooding_tenant_does_not_move_the_first_tokens_of_others(long: Callable[[float, float], float]) -> None:
    duration_s = long(30.0, 60.0)
    calm = _flood(duration_s, is_fair=True, is_flooded=False)
    flooded = _flood(duration_s, is_fair=True, is_flooded=True)
    assert flooded["p95"] <= 1.5 * calm["p95"]
    assert flooded["jain"] >= 0.99
    unfair = _flood(duration_s, is_fair=False, is_flooded=True)
    assert unfair["p95"] > 2 * calm["p95"]
    assert unfair["jain"] < 0.5


@pytest.mark.endure
def test_tokens_follow_weights_whatever_the_shape_of_requests(long: Callable[[float, float], float]) -> None:
    tenants = [
        Tenant("even", 8),
        Tenant("prompts", 8, prompt=(400, 1200), output=(1, 8)),
        Tenant("answers", 16, prompt=(8, 16), output=(200, 400)),
        Tenant("double", 32, weight=2),
        Tenant("fourfold", 40, weight=4),
    ]
    records = FairWorld(tenants, max_num_seqs=32).run(long(50.0, 120.0), warm_s=10.0)
    assert jain([records[tenant.name].tokens / tenant.weight for tenant in tenants]) >= 0.95


@settings(max_examples=examples(2), deadline=None)
@given(seed=st.integers(0, 10**6))
def test_nobody_starves_and_everything_is_conserved_among_tenants_at_random(seed: int) -> None:
    chance = random.Random(seed)
    tenants = []
    for index in range(chance.randint(2, 12)):
        digests = [f"{index}-{number}" for number in range(chance.randint(1, 4))]
        prompt, output = (
            sorted(chance.choices((1, 8, 60, 300, 1500), k=2)),
            sorted(chance.choices((1, 8, 60, 300), k=2)),
        )
        tenants.append(
            Tenant(
                f"t{index}",
                chance.choice((1, 1, 2, 8, 30)),
                (prompt[0], prompt[1]),
                (output[0], output[1]),
                chance.choice((1, 1, 1, 4, 1000)),
                chance.choice((0, 0, 0, -8, 8)),
                digests if chance.random() < 0.3 else (None,),
                chance.choice((0.0, 0.0, 1.0)),
                chance.choice((0.0, 10.0)),
            )
        )
    world = FairWorld(
        tenants, seed=seed, max_num_seqs=chance.choice((2, 4, 16)), num_blocks=chance.choice((1000, 1 << 14))
    )
    records = world.run(60.0)
    assert not any(record.errors for record in records.values())
    # each has a turn: that of the most aged, and in the worst case one after the other
    assert all(records[tenant.name].starved_s < 2 * AGE_S + len(tenants) * 2.0 for tenant in tenants), {
        name: record.starved_s for name, record in records.items()
    }


@pytest.mark.endure
def test_nobody_starves_for_ten_minutes_beside_a_flood(long: Callable[[float, float], float]) -> None:
    tenants = [*(Tenant(name, 2, think_s=0.3) for name in _LIGHT), Tenant("heavy", 200, output=(200, 800))]
    records = FairWorld(tenants).run(long(15.0, 600.0))
    assert max(record.starved_s for record in records.values()) < 5.0
