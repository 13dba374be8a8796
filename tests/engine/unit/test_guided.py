"""The scheduler with guides that are done when the test says so."""

from __future__ import annotations

import numpy as np
import pytest

from loraplex_engine.core.guide import GuideState
from loraplex_engine.core.request import Request
from loraplex_engine.core.step import StepPlan, StepResult
from loraplex_engine.errors import GrammarError
from loraplex_engine.wire.messages import TokenEvent
from schedules import EOS, World, code_of, shape


class ManualGuide:
    """READY again after each token, unless it is `slow`; ENDED after `length` tokens."""

    def __init__(self, length: int = 100) -> None:
        self.state = GuideState.PENDING
        self.allowed = np.zeros(0, dtype=np.uint32)
        self.error: GrammarError | None = None
        self.length = length
        self.slow = False
        self.seen: list[int] = []
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.append("begin")
        if len(self.calls) == 1:
            self._work()

    def advance(self, token_id: int) -> None:
        assert self.state is GuideState.READY
        self.seen.append(token_id)
        self._work()

    def _work(self) -> None:
        self.state = GuideState.PENDING
        if not self.slow:
            self.finish()

    def finish(self) -> None:
        self.state = GuideState.ENDED if len(self.seen) == self.length else GuideState.READY

    def fail(self) -> None:
        self.state, self.error = GuideState.FAILED, GrammarError()

    def wait(self, seconds: float) -> bool:
        return self.state is not GuideState.PENDING

    def close(self) -> None:
        self.calls.append("close")


class GuidedWorld(World):
    """Rows whose guides are not done get no token, as in the sampler."""

    def guided(self, name: str, prompt: int = 4, length: int = 100, **params: object) -> tuple[Request, ManualGuide]:
        request = self.request(name, prompt, **params)  # type: ignore[arg-type]
        guide = request.guide = ManualGuide(length)
        return request, guide

    def turn(self, token: int = 7) -> tuple[StepPlan, list[TokenEvent]]:
        events = self.scheduler.settle_guides()
        plan = self.scheduler.schedule()
        sampling = [row.request for row in plan.rows if row.samples]
        late = {r for r in sampling if r.guide is not None and r.guide.state is not GuideState.READY}
        sampled = {r.request_id: token for r in sampling if r not in late}
        result = StepResult(sampled, late=frozenset(r.request_id for r in late))
        events += [*plan.ended, *self.scheduler.update(plan, result)]
        self.scheduler.check_integrity()
        return plan, events


def tell(events: list[TokenEvent]) -> list[tuple[str, list[int], str | None]]:
    return [(event.request_id, event.token_ids, event.finish) for event in events]


def test_guide_begins_with_its_request_and_follows_its_tokens() -> None:
    world = GuidedWorld()
    _, guide = world.guided("g", max_tokens=3)
    assert guide.calls == []
    for token in (5, 6, 8):
        _, events = world.turn(token)
    # nobody wants to know what may follow the last one
    assert guide.seen == [5, 6]
    assert tell(events) == [("g", [8], "length")]
    assert guide.calls == ["begin", "close"]


def test_text_that_is_whole_ends_without_another_token() -> None:
    world = GuidedWorld()
    world.guided("g", length=2, max_tokens=30)
    events = [event for _ in range(4) for event in world.turn()[1]]
    assert tell(events) == [("g", [7], None), ("g", [7], None), ("g", [], "stop")]
    assert events[-1].stats is not None
    assert events[-1].stats.completion_tokens == 2
    assert world.pool.num_free == world.pool.num_blocks


def test_row_whose_guide_is_slow_stands_aside_and_then_computes_its_last_position_again() -> None:
    world = GuidedWorld(budget=32)
    slow, guide = world.guided("slow", 6, max_tokens=30)
    world.request("other", [31, 32, 33, 34, 35], max_tokens=30)
    world.turn()
    guide.slow = True
    world.turn()
    plan, events = world.turn()
    assert shape(plan) == [("slow", 7, 1, True), ("other", 6, 1, True)]
    assert tell(events) == [("other", [7], None)]
    assert slow.num_computed == 7
    for start in (7, 8, 9):
        plan, events = world.turn()
        assert shape(plan) == [("other", start, 1, True)]
    guide.finish()
    plan, events = world.turn()
    assert ("slow", 7, 1, True) in shape(plan)
    assert ("slow", [7], None) in tell(events)


def test_prompt_whose_guide_is_not_built_keeps_what_it_computed() -> None:
    world = GuidedWorld()
    request, guide = world.guided("g", 18)
    guide.slow = True
    starts = []
    for _ in range(6):
        plan, events = world.turn()
        starts += shape(plan)
        assert events == []
    assert starts == [("g", 0, 8, False), ("g", 8, 8, False), ("g", 16, 2, True)]
    assert (request.num_computed, world.scheduler.guided.num_late) == (17, 1)
    guide.finish()
    plan, events = world.turn()
    assert shape(plan) == [("g", 17, 1, True)]
    assert tell(events) == [("g", [7], None)]
    assert world.scheduler.guided.num_late == 0


@pytest.mark.parametrize("is_running", [True, False])
def test_guide_that_fails_ends_its_request_alone(is_running: bool) -> None:
    world = GuidedWorld(budget=32)
    request, guide = world.guided("bad", max_tokens=30)
    world.request("other", max_tokens=30)
    world.turn()
    if not is_running:
        world.scheduler._preempt(request, world.scheduler._draft)
    guide.fail()
    _, events = world.turn()
    assert [(event.request_id, code_of(event)) for event in events] == [("bad", "invalid_grammar"), ("other", None)]
    assert guide.calls[-1] == "close"


def test_preempted_request_keeps_its_place_in_the_grammar() -> None:
    world = GuidedWorld(num_blocks=4, budget=32)
    world.guided("old", 7, max_tokens=9)
    young, guide = world.guided("young", 7, max_tokens=9)
    tokens: list[int] = []
    for token in range(10, 40):
        plan, events = world.turn(token)
        tokens += [token_id for event in events if event.request_id == "young" for token_id in event.token_ids]
        if not plan.rows:
            break
    assert young.preemptions == 1
    assert len(tokens) == 9
    assert guide.seen == tokens[:-1]
    assert guide.calls == ["begin", "begin", "close"]


def test_late_request_that_is_preempted_starts_over_like_any_other() -> None:
    world = GuidedWorld()
    request, guide = world.guided("g")
    guide.slow = True
    world.turn()
    assert world.scheduler.guided.num_late == 1
    world.scheduler._preempt(request, world.scheduler._draft)
    assert world.scheduler.guided.num_late == 0
    assert shape(world.turn()[0])[0][0] == "g"


def test_aborted_request_lets_go_of_its_guide() -> None:
    world = GuidedWorld()
    _, guide = world.guided("g")
    guide.slow = True
    world.turn()
    assert world.scheduler.abort("g", "abort") is not None
    assert guide.calls == ["begin", "close"]
    assert world.scheduler.guided.num_late == 0
    world.scheduler.check_integrity()


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 3}, {}])
def test_end_that_the_grammar_leaves_alone_ends_the_request(params: dict[str, object]) -> None:
    world = GuidedWorld()
    world.guided("g", **params)
    _, events = world.turn(EOS)
    assert tell(events) == [("g", [], "stop")]


def test_stop_token_that_the_grammar_forces_before_min_tokens_is_text() -> None:
    world = GuidedWorld()
    world.guided("g", min_tokens=2, stop_token_ids=(9,))
    assert tell(world.turn(9)[1]) == [("g", [9], None)]
    assert tell(world.turn(9)[1]) == [("g", [9], None)]
    assert tell(world.turn(9)[1]) == [("g", [], "stop")]
