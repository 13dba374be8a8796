"""Whose fault it is when a request's numbers are not finite."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loraplex_engine.core.request import Request
from loraplex_engine.core.step import StepPlan
from loraplex_engine.errors import AdapterQuarantinedError
from loraplex_engine.wire.messages import TokenEvent
from schedules import World, code_of, shape

Fault = Callable[[Request, StepPlan], bool]


def by_adapter(request: Request, _: StepPlan) -> bool:
    return request.digest == "bad"


def by_prompt(request: Request, _: StepPlan) -> bool:
    return request.prompt_ids[0] >= 50


def by_company(_: Request, plan: StepPlan) -> bool:
    return len(plan.rows) > 1


def _run(world: World, fault: Fault, num_steps: int = 8) -> list[TokenEvent]:
    return [event for _ in range(num_steps) for event in world.step(is_invalid=fault)[1]]


def _prompt(number: int) -> list[int]:
    return [number, 2, 3, 4]


@pytest.mark.parametrize(("fault", "cause"), [(by_adapter, "adapter"), (by_prompt, "base"), (by_company, "company")])
def test_failed_request_is_computed_again_alone_to_find_who_is_to_blame(fault: Fault, cause: str) -> None:
    world = World(budget=32)
    world.load("bad")
    world.request("one", _prompt(50), "bad")
    world.request("two", _prompt(1), None)
    events = _run(world, fault)
    assert ("one", "adapter_output_invalid") in [(event.request_id, code_of(event)) for event in events]
    assert {event.request_id for event in events} == {"one", "two"}
    assert world.verdicts == [cause]
    assert world.residency.health.num_strikes == (cause == "adapter")
    assert not world.scheduler.waiting
    assert not world.scheduler.running
    assert world.pool.num_free == 16


def test_questions_have_a_step_of_their_own_and_read_no_cached_block() -> None:
    world = World(num_blocks=32, budget=16)
    world.load("bad")
    world.request("cached", 9, "bad", max_tokens=1)
    world.step()
    world.request("neighbour", 1, max_tokens=12)
    world.request("fails", 9, "bad")
    world.step(is_invalid=by_adapter)
    assert shape(world.step(is_invalid=by_adapter)[0]) == [("blame:0", 0, 9, True)]
    assert shape(world.step(is_invalid=by_adapter)[0]) == [("blame:1", 0, 9, True)]
    assert [row.request.request_id for row in world.step()[0].rows] == ["neighbour"]
    assert world.verdicts == ["adapter"]


def test_questions_ask_from_the_same_invocation_on_whatever_the_outputs_hold() -> None:
    world = World(budget=32)
    world.loader.invocation_ids["bad"] = (101,)
    world.load("bad")
    starts: list[int] = []

    def late(request: Request, _: StepPlan) -> bool:
        starts.append(request.adapter_start)
        return request.digest == "bad" and request.num_tokens > 6

    world.request("fails", [5, 101, 3, 4], "bad", max_tokens=8)
    for _ in range(8):
        world.step(token=101, is_invalid=late)
    assert world.verdicts == ["adapter"]
    # the last question, on the base, has no adapter
    assert starts == [1, 1, 1, 1, 1, 0]


def test_three_prompts_quarantine_an_adapter_here_and_end_those_that_wait_for_it() -> None:
    world = World(num_slots=2, budget=32, max_num_seqs=1)
    world.load("bad", "good")
    for number in (11, 11, 12):
        world.request(f"r{number}", _prompt(number), "bad")
        _run(world, by_adapter)
    assert world.verdicts == ["adapter"] * 3
    assert world.residency.find_failure("bad") is None
    world.request("third", _prompt(13), "bad")
    world.request("waits", _prompt(14), "bad")
    world.request("good", _prompt(14), "good", max_tokens=1)
    world.scheduler.abort("waits", "abort")
    world.request("waits", _prompt(11), "bad")
    ends = {event.request_id: code_of(event) for event in _run(world, by_adapter) if event.finish}
    assert ends["third"] == "adapter_output_invalid"
    assert ends["good"] is None
    assert ends["waits"] in ("adapter_output_invalid", "adapter_quarantined")
    with pytest.raises(AdapterQuarantinedError, match="quarantined"):
        world.request("new", _prompt(1), "bad")
    assert set(world.residency.health.state()["quarantined"]) == {"bad"}


@pytest.mark.parametrize("act", ["welcome", "drop"])
def test_quarantine_ends_when_the_digest_is_dropped_or_asked_for_by_name(act: str) -> None:
    world = World(budget=32)
    world.load("bad")
    for number in (11, 12, 13):
        world.request(f"r{number}", _prompt(number), "bad")
        _run(world, by_adapter)
    getattr(world.residency, act)("bad")
    world.request("again", _prompt(1), "bad", max_tokens=1)
    world.step()
    if act == "drop":
        world.loader.finish("bad")
        world.settle_loads()
        world.step()
    assert not world.scheduler.waiting


def test_flood_of_failures_asks_a_bounded_number_of_questions() -> None:
    world = World(num_blocks=64, budget=64, max_num_seqs=16)
    world.load("bad")
    for number in range(16):
        world.request(f"r{number}", [7, 2, 3, number + 20], "bad")
    ends = [event for event in _run(world, by_adapter, 60) if event.finish]
    assert {code_of(event) for event in ends} == {"adapter_output_invalid"}
    assert len(ends) == 16
    assert world.verdicts.count("adapter") == 3
    assert len(world.verdicts) == 16


def test_long_request_is_asked_about_by_its_start() -> None:
    world = World(num_blocks=32, budget=8)
    world.load("bad")
    world.request("long", 30, "bad")
    _run(world, by_adapter, 4)
    assert shape(world.step()[0]) == [("blame:0", 0, 8, True)]
    assert world.verdicts == ["unknown"]
