"""What requests share: whole blocks, the block in which they part, and a prefix that one of them is computing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loraplex_engine.core.request import Request
from loraplex_engine.core.step import StepPlan, StepResult
from loraplex_engine.errors import StepFailedError
from loraplex_engine.scheduling.budget import StepBudget
from loraplex_engine.scheduling.fair import VirtualTokens
from loraplex_engine.wire.messages import SamplingParams
from schedules import Clock, World, shape

PREFIX = list(range(100, 1100))


def _finish(world: World, token: int = 7) -> None:
    while world.scheduler.running or world.scheduler.waiting:
        world.step(token)


def _vouch_for_all(plan: StepPlan) -> StepResult:
    sampled = {row.request.request_id: 7 for row in plan.rows if row.samples}
    return StepResult(sampled, vouched=frozenset(r.request.request_id for r in plan.rows if not r.samples))


def test_eight_requests_with_one_new_prefix_compute_it_once_and_then_their_tails_together() -> None:
    world = World(num_blocks=600, budget=512, max_num_seqs=8, max_model_len=2048)
    requests = [world.request(f"r{i}", [*PREFIX, *range(i * 10, i * 10 + 3)], max_tokens=2) for i in range(1, 9)]
    plans = [world.step()[0] for _ in range(3)]
    assert [plan.num_tokens for plan in plans] == [512, 491, 7 * 3 + 1]
    assert len(plans[2].rows) == 8
    assert [request.num_cached for request in requests] == [0] + [1000] * 7
    assert world.scheduler.num_prefix_hits == 7000
    assert world.scheduler.num_prefix_queries == 8 * 1003


@pytest.mark.parametrize("budget", [512, 48, 17])
def test_each_tenant_computes_its_new_prefix_once_while_tenants_take_turns(budget: int) -> None:
    clock = Clock()
    share = VirtualTokens(clock)
    world = World(num_blocks=600, budget=budget, max_num_seqs=18, max_model_len=2048, share=share, clock=clock)
    requests = [
        world.request(f"{tenant}{i}", [*PREFIX[:200], *range(i * 10, i * 10 + 3)], max_tokens=2, tenant=tenant)
        for i in range(1, 7)
        for tenant in "abc"
    ]
    _finish(world)
    assert sorted(request.num_cached for request in requests) == [0] * 3 + [200] * 15


def test_request_that_waits_does_not_look_for_its_prefix_after_each_chunk_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step_budget = StepBudget()
    monkeypatch.setattr(step_budget, "allow", lambda _, wanted: min(16, wanted))
    world = World(num_blocks=600, budget=64, max_model_len=2048, step_budget=step_budget)
    looks: list[int] = []
    find_prefix = world.pool.find_prefix
    monkeypatch.setattr(world.pool, "find_prefix", lambda chains: looks.append(len(chains)) or find_prefix(chains))
    world.request("owner", PREFIX[:160])
    late = world.request("late", [*PREFIX[:150], 1, 2, 3], max_tokens=1)
    num_steps = 0
    while late in world.scheduler.waiting:
        plan = world.scheduler.schedule()
        world.scheduler.update(plan, _vouch_for_all(plan))
        num_steps += 1
    assert (num_steps, len(looks)) == (11, 3)
    assert late.num_cached == 150


def test_waiting_for_a_prefix_holds_back_nobody_else() -> None:
    world = World(num_blocks=60, budget=16, max_model_len=256)
    world.request("owner", PREFIX[:40])
    world.step()
    world.request("waits", [*PREFIX[:36], 1, 2])
    world.request("other", [1, 2, 3])
    world.step()
    plan, _ = world.step()
    assert [row.request.request_id for row in plan.rows] == ["owner", "other"]


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_next_one_takes_over_when_the_request_that_computes_a_prefix_ends(end: str) -> None:
    world = World(num_blocks=60, budget=16, max_model_len=256)
    world.request("owner", PREFIX[:40])
    world.request("second", [*PREFIX[:38], 1])
    world.request("third", [*PREFIX[:38], 2])
    plan = world.scheduler.schedule()
    assert shape(plan) == [("owner", 0, 16, False)]
    world.scheduler.update(plan, StepResult({}, frozenset({"owner"}) if end == "fail" else frozenset()))
    world.scheduler.abort("owner", "abort")
    assert shape(world.step()[0]) == [("second", 0, 16, False)]
    assert [request.request_id for request in world.scheduler.waiting] == ["third"]


def test_wait_for_a_prefix_is_bounded() -> None:
    world = World(num_blocks=600, budget=4, max_model_len=2048)
    world.request("owner", PREFIX)
    world.step()
    late = world.request("waits", [*PREFIX[:30], 1])
    world.step()
    world.clock.now += 4.9
    world.step()
    assert late in world.scheduler.waiting
    world.clock.now += 0.2
    world.scheduler.abort("owner", "abort")
    world.request("again", PREFIX)
    world.step()
    assert late in world.scheduler.running


def test_vouched_chunks_of_a_prompt_are_shared_before_it_ends_and_others_are_not() -> None:
    cached = {}
    for name in ("vouched", "not vouched"):
        world = World(num_blocks=100, budget=16, max_model_len=256)
        world.request("owner", PREFIX[:64])
        plan = world.scheduler.schedule()
        world.scheduler.update(plan, _vouch_for_all(plan) if name == "vouched" else StepResult({}))
        early = world.request("early", [*PREFIX[:16], 1, 2, 3, 4], max_tokens=1)
        world.scheduler.schedule()
        cached[name] = early.num_cached
        # with its chunk known, it waits for a step with tokens left; without, for the prompt's end
        assert early in world.scheduler.waiting
        world.scheduler.abort("owner", "abort")
        world.scheduler.schedule()
        cached[name] = early.num_cached
    assert cached == {"vouched": 16, "not vouched": 0}


def test_request_that_parts_from_a_known_one_inside_a_block_copies_that_block() -> None:
    world = World(budget=32)
    first = world.request("first", [1, 2, 3, 4, 5, 6, 7], max_tokens=5)
    world.step()
    second = world.request("second", [1, 2, 3, 4, 5, 6, 9, 9], max_tokens=1)
    plan, _ = world.step()
    assert shape(plan) == [("first", 7, 1, True), ("second", 6, 2, True)]
    assert second.num_cached == 6
    assert plan.block_copies == [(first.block_ids[1], 2)]
    assert first.block_ids[1] == 1


def test_equal_prompts_compute_one_token_each_in_a_block_of_their_own() -> None:
    world = World(budget=32)
    first = world.request("r0", [1, 2, 3, 4, 5, 6], max_tokens=5)
    others = [world.request(f"r{i}", [1, 2, 3, 4, 5, 6], max_tokens=5) for i in (1, 2, 3)]
    assert shape(world.step()[0]) == [("r0", 0, 6, True)]
    plan, _ = world.step()
    assert shape(plan)[1:] == [(f"r{i}", 5, 1, True) for i in (1, 2, 3)]
    assert [source for source, _ in plan.block_copies] == [first.block_ids[1]] * 3
    assert [r.block_ids[0] for r in others] == [first.block_ids[0]] * 3
    assert len({r.block_ids[1] for r in (first, *others)}) == 4
    assert [r.num_cached for r in others] == [5, 5, 5]


def test_next_turn_of_a_talk_starts_after_the_last_computed_token() -> None:
    world = World(budget=32)
    world.request("turn", [1, 2, 3, 4, 5, 6], max_tokens=3)
    _finish(world, token=8)
    turn = world.request("next turn", [1, 2, 3, 4, 5, 6, 8, 8, 8, 9], max_tokens=1)
    world.step()
    assert turn.num_cached == 8


def test_copied_block_that_nobody_holds_is_not_given_away_before_it_is_copied() -> None:
    world = World(num_blocks=4, budget=32)
    for name, prompt in (("first", [1, 2, 3, 4, 5, 6]), ("other", [11, 12, 13, 14, 15, 16])):
        world.request(name, prompt, max_tokens=1)
        _finish(world)
    # the oldest free block is the one to copy
    world.request("second", [1, 2, 3, 4, 5, 9], max_tokens=2)
    plan = world.scheduler.schedule()
    assert plan.block_copies == [(1, 3)]
    assert world.pool.num_free == 1
    world.scheduler.check_integrity()
    world.scheduler.update(plan, StepResult({"second": 7}))
    world.scheduler.check_integrity()
    assert world.pool.num_free == 2


def test_copied_block_is_let_go_when_the_step_fails() -> None:
    world = World(num_blocks=4, budget=32)
    world.request("first", [1, 2, 3, 4, 5, 6], max_tokens=1)
    _finish(world)
    world.request("second", [1, 2, 3, 4, 5, 9], max_tokens=2)
    world.scheduler.fail_plan(world.scheduler.schedule(), StepFailedError())
    world.scheduler.check_integrity()
    assert world.pool.num_free == 4


def test_pool_without_a_block_to_spare_computes_what_it_could_have_copied() -> None:
    world = World(num_blocks=1, budget=32)
    world.request("first", [1, 2, 3], max_tokens=1)
    _finish(world)
    second = world.request("second", [1, 2, 9], max_tokens=1)
    assert shape(world.step()[0]) == [("second", 0, 3, True)]
    assert second.num_cached == 0


def test_block_in_which_numbers_went_bad_is_copied_by_nobody() -> None:
    world = World(budget=32)
    world.load("d1")
    bad: Callable[[Request, StepPlan], bool] = lambda request, _: request.digest is not None  # noqa: E731
    world.request("bad", [1, 2, 3, 4, 5, 6], "d1")
    world.step(is_invalid=bad)
    world.step()
    again = world.request("again", [1, 2, 3, 4, 5, 6], "d1", max_tokens=1)
    world.step()
    assert again.num_cached == 0


def test_part_of_a_block_is_not_shared_across_tenants_or_adapters() -> None:
    world = World(budget=64, num_blocks=32)
    world.load("d1")
    world.request("base", [1, 2, 3], max_tokens=1)
    world.step()
    requests = [world.request("adapter", [1, 2, 3], "d1"), world.request("tenant", [1, 2, 3], tenant="other")]
    world.step()
    assert [request.num_cached for request in requests] == [0, 0]


def test_prefixes_are_shared_within_a_salt_alone() -> None:
    world = World(budget=64, num_blocks=32)
    num_cached = {}
    for index, (tenant, salt) in enumerate([("x", "s"), ("x", "s"), ("x", "t"), ("x", ""), ("y", "s"), ("x", "")]):
        request = Request(f"r{index}", [1, 2, 3, 4, 5, 6], SamplingParams(1), None, tenant, cache_salt=salt)
        world.scheduler.add(request)
        world.step()
        num_cached[index] = request.num_cached
    assert num_cached == {0: 0, 1: 5, 2: 0, 3: 0, 4: 0, 5: 5}


def test_requests_that_share_their_blocks_start_where_copies_of_them_would_not_fit() -> None:
    world = World(num_blocks=14, budget=64)
    world.request("first", PREFIX[:40], max_tokens=2)
    world.step()
    for index in range(3):
        world.request(f"s{index}", [*PREFIX[:40], index], max_tokens=2)
    plan, _ = world.step()
    assert [row.request.request_id for row in plan.rows] == ["first", "s0", "s1", "s2"]
