"""Prompts that are scored: every position's logits once, told with the first token, whatever happens in between."""

from __future__ import annotations

import math
from array import array

import pytest

from loraplex_engine.core.request import Request
from loraplex_engine.core.step import StepPlan, StepResult
from loraplex_engine.scheduling.budget import StepBudget
from loraplex_engine.wire.messages import (
    PromptScores,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
    decode_to_front,
    encode,
    join_scores,
)
from schedules import World, code_of, shape

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def _scored(plan: StepPlan) -> dict[str, list[int]]:
    """Positions whose logits each request wants of the step."""
    return {row.request.request_id: list(row.scored) for row in plan.rows if row.scored}


def _step(world: World, token: int = 7) -> tuple[StepPlan, list[TokenEvent]]:
    """One step in which the value at each scored position is that position."""
    plan = world.scheduler.schedule()
    result = StepResult(
        {row.request.request_id: token for row in plan.rows if row.samples},
        prompt_logprobs={
            name: PromptScores(0, array("f", [-p for p in where]).tobytes()) for name, where in _scored(plan).items()
        },
        vouched=frozenset(row.request.request_id for row in plan.rows if not row.samples),
    )
    events = world.scheduler.update(plan, result)
    world.scheduler.check_integrity()
    return plan, events


def _values(event: TokenEvent) -> list[float]:
    return [-told.logprob for told in event.prompt_logprobs]


def test_prompt_is_scored_chunk_by_chunk_and_told_with_the_first_token() -> None:
    world = World(budget=4)
    world.request("r", PROMPT, prompt_logprobs=0)
    steps = [_step(world) for _ in range(4)]
    assert [_scored(plan).get("r", []) for plan, _ in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8], []]
    assert [[(e.token_ids, _values(e)) for e in events] for _, events in steps] == [
        [],
        [],
        [([7], list(range(9)))],
        [([7], [])],
    ]


def test_prompt_of_one_token_has_nothing_to_score() -> None:
    world = World()
    world.request("r", [5], prompt_logprobs=2)
    plan, (event,) = _step(world)
    assert (_scored(plan), event.token_ids, list(event.prompt_logprobs)) == ({}, [7], [])


def test_request_without_tokens_ends_with_its_prompt() -> None:
    world = World(budget=8)
    world.request("r", PROMPT, prompt_logprobs=0, max_tokens=0)
    plan, events = _step(world)
    assert (shape(plan), events) == ([("r", 0, 8, False)], [])
    plan, (event,) = _step(world)
    assert shape(plan) == [("r", 8, 2, False)]
    assert (event.token_ids, event.finish, _values(event)) == ([], "length", list(range(9)))
    assert event.stats is not None
    assert (event.stats.prompt_tokens, event.stats.completion_tokens) == (10, 0)
    assert world.pool.num_free == world.pool.num_blocks


def test_unsampled_request_with_numbers_that_are_not_finite_fails() -> None:
    world = World()
    world.request("r", 4, max_tokens=0)
    plan = world.scheduler.schedule()
    (event,) = world.scheduler.update(plan, StepResult({}, frozenset({"r"})))
    assert code_of(event) == "internal_error"


def test_scored_prompt_takes_no_prefix_and_leaves_its_own_to_others() -> None:
    world = World(budget=32, num_blocks=32)
    world.request("known", PROMPT, max_tokens=1)
    _step(world)
    scored = world.request("scored", [*PROMPT, 11, 12, 13, 14], prompt_logprobs=0, max_tokens=1)
    plan, _ = _step(world)
    assert shape(plan) == [("scored", 0, 14, True)]
    later = world.request("later", [*PROMPT, 11, 12, 13, 14, 15], max_tokens=1)
    _step(world)
    assert (scored.num_cached, later.num_cached) == (0, 14)
    assert (world.scheduler.num_prefix_queries, world.scheduler.num_prefix_hits) == (25, 14)


def test_others_wait_for_a_prefix_that_is_being_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    step_budget = StepBudget()
    monkeypatch.setattr(step_budget, "allow", lambda _, wanted: min(4, wanted))
    world = World(budget=16, num_blocks=32, step_budget=step_budget)
    world.request("scored", PROMPT, prompt_logprobs=0, max_tokens=1)
    late = world.request("late", [*PROMPT[:8], 20], max_tokens=1)
    assert shape(_step(world)[0]) == [("scored", 0, 4, False)]
    assert shape(_step(world)[0]) == [("scored", 4, 4, False)]
    assert shape(_step(world)[0]) == [("scored", 8, 2, True), ("late", 8, 1, True)]
    assert late.num_cached == 8


def _finish(world: World, request: Request) -> list[list[float]]:
    """What the events of a request tell of its prompt, up to its end."""
    told: list[list[float]] = []
    for _ in range(200):
        told += [_values(event) for event in _step(world)[1] if event.request_id == request.request_id]
        if request not in world.scheduler.waiting and request not in world.scheduler.running:
            return told
    raise AssertionError("the request did not end")


def test_preempted_prompt_goes_on_to_be_scored_where_it_was() -> None:
    world = World(num_blocks=7, budget=2, max_num_seqs=2)
    world.request("old", [30, 31], max_tokens=18, ignore_eos=True)
    _step(world)
    young = world.request("young", list(range(1, 16)), prompt_logprobs=0, max_tokens=1)
    for _ in range(16):
        _step(world)
    assert young.preemptions == 1
    assert 0 < young.num_scored < 14
    # a position that was scored twice would be told twice
    assert _finish(world, young) == [list(range(14))]


def test_request_that_is_preempted_after_its_first_token_is_scored_and_told_once() -> None:
    world = World(num_blocks=6, budget=32, max_num_seqs=2)
    world.request("old", 8, max_tokens=16, ignore_eos=True)
    young = world.request("young", list(range(40, 48)), prompt_logprobs=0, max_tokens=8, ignore_eos=True)
    told = _finish(world, young)
    assert young.preemptions > 0
    assert told == [list(range(7)), *[[]] * 7]


def test_scores_pass_the_wire_packed_and_are_read_one_by_one() -> None:
    parts = [PromptScores(2, array("f", values).tobytes(), array("i", ids).tobytes()) for values, ids in _PARTS]
    event = TokenEvent("r", [7], prompt_logprobs=join_scores(parts))
    found = decode_to_front(encode(TokenEvents([event])))
    assert isinstance(found, TokenEvents)
    scores = found.events[0].prompt_logprobs
    assert list(scores) == [
        TokenLogprobs(-0.5, [(9, -0.25), (1, -0.5)]),
        TokenLogprobs(-math.inf, [(3, -0.125)]),
        TokenLogprobs(-2.0, [(5, -1.0), (4, -1.5)]),
    ]
    assert len(scores) == 3
    with pytest.raises(IndexError):
        scores[3]
    plain = decode_to_front(encode(TokenEvents([TokenEvent("r", [7])])))
    assert isinstance(plain, TokenEvents)
    assert len(plain.events[0].prompt_logprobs) == 0


_PARTS = [
    ([-0.5, -0.25, -0.5, -math.inf, -0.125, -math.inf], [9, 1, 3, 0]),
    ([-2.0, -1.0, -1.5], [5, 4]),
]
