"""Who may start: room in the pool, seats, and the cases of caches and batching that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest

from loraplex_engine.core.step import StepResult
from loraplex_engine.errors import TooLargeForCacheError
from loraplex_engine.scheduling.budget import StepBudget
from schedules import World, shape


def _names(world: World) -> list[str]:
    return [row.request.request_id for row in world.step()[0].rows]


def test_first_request_that_lacks_blocks_holds_back_smaller_ones_behind_it() -> None:
    world = World(num_blocks=8, budget=64)
    world.request("runs", [1, 2, 3, 4, 5, 6], max_tokens=9)
    world.step()
    world.request("large", [11] * 25, max_tokens=2)
    world.request("small", [21], max_tokens=2)
    assert _names(world) == ["runs"]
    world.scheduler.abort("runs", "abort")
    assert _names(world) == ["large", "small"]


def test_tokens_that_running_requests_still_have_to_compute_are_not_promised_twice() -> None:
    world = World(num_blocks=10, budget=8)
    world.request("long", [1] * 28, max_tokens=4)
    world.step()
    assert world.pool.num_free == 8
    world.request("other", [2] * 16, max_tokens=4)
    for _ in range(3):
        assert _names(world) == ["long"]
    assert world.scheduler.num_preemptions == 0


def test_blocks_stay_free_for_running_requests_to_grow_when_another_starts_beside_them() -> None:
    started = {}
    for num_spare in (1, 2, 3):
        world = World(num_blocks=200, budget=2000, max_model_len=4000)
        world.request("runs", [1] * 4, max_tokens=50)
        world.step()
        # the one that runs has two blocks for five tokens
        world.request("new", [2] * (4 * (200 - 2 - num_spare)), max_tokens=4)
        world.step()
        started[num_spare] = len(world.scheduler.running) == 2
    assert started == {1: False, 2: True, 3: True}


def test_lone_request_may_use_the_whole_pool() -> None:
    world = World(num_blocks=200, budget=2000, max_model_len=4000)
    world.request("all of it", [1] * 796, max_tokens=4)
    assert _names(world) == ["all of it"]
    for _ in range(3):
        world.step()
    assert not world.scheduler.running
    assert world.scheduler.num_preemptions == 0


def test_pool_without_blocks_refuses_every_request_by_a_clear_error() -> None:
    world = World(num_blocks=0)
    with pytest.raises(TooLargeForCacheError, match="raise --kv-cache-memory-bytes"):
        world.request("r", [1], max_tokens=1)
    assert world.step()[0].rows == []


def test_pool_of_one_block_serves_what_fits_one_after_the_other() -> None:
    world = World(num_blocks=1, budget=32)
    with pytest.raises(TooLargeForCacheError):
        world.request("too long", [1, 2, 3], max_tokens=2)
    for name in ("a", "b"):
        world.request(name, [1, 2], max_tokens=2)
    assert [_names(world) for _ in range(5)] == [["a"], ["a"], ["b"], ["b"], []]


def test_length_limit_of_the_model_counts_when_a_request_is_measured_against_the_pool() -> None:
    world = World(num_blocks=4, budget=32, max_model_len=16)
    world.request("r", [1, 2], max_tokens=1000)
    assert _names(world) == ["r"]
    with pytest.raises(TooLargeForCacheError):
        world.request("longer than the pool by its prompt", [1] * 16, max_tokens=1)


@pytest.mark.parametrize("order", list(permutations(["base", "a", "b", "base again"])))
def test_prefix_of_one_adapter_is_found_by_that_adapter_alone_in_any_order(order: tuple[str, ...]) -> None:
    world = World(num_blocks=64, budget=64)
    world.load("a", "b")
    cached = {}
    for name in order:
        request = world.request(name, [1, 2, 3, 4, 5, 6, 7, 8, 9], name if len(name) == 1 else None, max_tokens=1)
        world.step()
        cached[name] = request.num_cached
    second_base = max(("base", "base again"), key=order.index)
    assert cached == {**dict.fromkeys(order, 0), second_base: 8}


@pytest.mark.parametrize(("length", "common", "cached"), [(33, 15, 15), (33, 16, 16), (33, 17, 17), (33, 1, 1)])
def test_hits_are_counted_in_tokens_up_to_where_prompts_part(length: int, common: int, cached: int) -> None:
    world = World(num_blocks=64, budget=64, max_model_len=128)
    world.request("first", list(range(1, length + 1)), max_tokens=1)
    world.step()
    second = world.request("second", [*range(1, common + 1), *[99] * (length - common)], max_tokens=1)
    plan, _ = world.step()
    assert (second.num_cached, plan.num_tokens) == (cached, length - cached)


def test_same_prompt_twice_on_an_adapter_computes_one_token() -> None:
    world = World(num_blocks=200, budget=512, max_model_len=1024)
    world.load("a")
    for _ in range(2):
        world.request(request_id := f"r{world.scheduler.num_prefix_queries}", list(range(1, 513)), "a", max_tokens=1)
        plan, (event,) = world.step()
    assert shape(plan) == [(request_id, 511, 1, True)]
    assert event.stats is not None
    assert event.stats.cached_tokens == 511


def test_requests_given_up_while_their_adapter_loads_leave_nothing_behind() -> None:
    world = World(max_waiting=1000)
    for index in range(500):
        world.request(str(index), digest="cold")
    world.step()
    for index in range(500):
        assert world.scheduler.abort(str(index), "abort") is not None
    world.scheduler.check_integrity()
    assert len(world.scheduler.waiting) == 0
    assert world.pool.num_free == 16
    assert list(world.residency.held_digests) == []


def test_turn_given_up_in_the_middle_leaves_the_next_one_what_was_computed_and_nothing_else() -> None:
    world = World(num_blocks=32, budget=32)
    world.request("given up", [1, 2, 3, 4, 5, 6], max_tokens=20)
    for token in (8, 8, 8):
        world.step(token)
    world.scheduler.abort("given up", "abort")
    clean = world.request("clean", [1, 2, 3, 4, 5, 6], max_tokens=3)
    events = [event for _ in range(3) for event in world.step(9)[1]]
    assert clean.num_cached == 5
    assert [event.token_ids for event in events] == [[9], [9], [9]]


def test_preempted_request_is_told_each_token_once() -> None:
    world = World(num_blocks=6, budget=32, max_num_seqs=3)
    for index in range(3):
        world.request(str(index), [10 * index + 1, 10 * index + 2], max_tokens=12, ignore_eos=True)
    told: dict[str, list[int]] = {str(index): [] for index in range(3)}
    stats = {}
    for token in range(100, 200):
        for event in world.step(token)[1]:
            told[event.request_id] += event.token_ids
            if event.finish:
                stats[event.request_id] = event.stats
    assert world.scheduler.num_preemptions > 0
    assert all(len(tokens) == 12 == len(set(tokens)) for tokens in told.values())
    assert [stats[name].completion_tokens for name in told] == [12, 12, 12]  # type: ignore[union-attr]


class RecordingBudget(StepBudget):
    """Lets `size` tokens of prompts into a step, and remembers what it was told."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = self.left = size
        self.begun: list[tuple[list[int], list[tuple[int, int]]]] = []
        self.observed: list[tuple[list[int], list[tuple[int, int]], float]] = []

    def begin(self, decode_context_lens: Sequence[int], prompts: Sequence[tuple[int, int]]) -> None:
        self.left = self.size
        self.begun.append((list(decode_context_lens), list(prompts)))

    def allow(self, start: int, wanted: int) -> int:
        count = min(wanted, self.left)
        self.left -= count
        return count

    def observe(self, decode_context_lens: Sequence[int], chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        self.observed.append((list(decode_context_lens), list(chunks), seconds))


def test_budget_of_seconds_bounds_prompts_and_never_rows_that_decode() -> None:
    budget = RecordingBudget(3)
    world = World(num_blocks=64, budget=32, step_budget=budget)
    world.request("a", [1, 2], max_tokens=9)
    world.step()
    world.request("b", [11, 12, 13, 14, 15], max_tokens=9)
    world.request("c", [21, 22, 23, 24], max_tokens=9)
    plans = [shape(world.step()[0]) for _ in range(4)]
    assert plans == [
        [("a", 2, 1, True), ("b", 0, 3, False)],
        [("a", 3, 1, True), ("b", 3, 2, True), ("c", 0, 1, False)],
        [("a", 4, 1, True), ("b", 5, 1, True), ("c", 1, 3, True)],
        [("a", 5, 1, True), ("b", 6, 1, True), ("c", 4, 1, True)],
    ]


def test_budget_learns_what_ran_and_how_long_it_took() -> None:
    budget = RecordingBudget(100)
    world = World(num_blocks=64, budget=32, step_budget=budget)
    world.request("a", [1, 2], max_tokens=9)
    world.step()
    world.request("b", [11, 12, 13, 14, 15], max_tokens=9)
    plan = world.scheduler.schedule()
    world.clock.now += 0.25
    world.scheduler.update(plan, StepResult({"a": 7, "b": 7}))
    assert budget.begun[-1] == ([3], [(0, 5)])
    assert budget.observed[-1] == ([3], [(0, 5)], 0.25)


def test_budget_is_asked_anew_when_those_that_waited_for_a_prefix_can_start() -> None:
    budget = RecordingBudget(30)
    world = World(num_blocks=64, budget=32, step_budget=budget)
    for index in range(3):
        world.request(f"r{index}", [1, 2, 3, 4, 5, 10 + index], max_tokens=9)
    assert [len(world.step()[0].rows) for _ in range(2)] == [1, 3]
    assert budget.begun[0][1] == [(0, 6)] * 3
    assert budget.begun[1] == ([7], [(0, 6)] * 2)
