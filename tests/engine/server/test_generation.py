"""One generation against a core that is only a list: endings that the sockets make rare."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from loraplex_engine.errors import ClientGoneError, ReplicaFailedError
from loraplex_engine.server import generation as module
from loraplex_engine.server.generation import Generation, GenerationSpec
from loraplex_engine.server.logprob import CompletionLogprobs
from loraplex_engine.server.tool.format import FORMATS
from loraplex_engine.server.tool.plan import ToolPlan
from loraplex_engine.token_table import TokenTable
from loraplex_engine.wire.done import RequestDone
from loraplex_engine.wire.messages import AddRequest, ErrorInfo, RequestStats, SamplingParams, TokenEvent, TokenLogprobs

TABLE = TokenTable({index: bytes([index]) for index in range(128)}, has_leading_space=False)


class ListCore:
    def __init__(self) -> None:
        self.aborted: list[tuple[str, str]] = []
        self.sinks: dict[str, Callable[[TokenEvent], None]] = {}

    def add(self, request: AddRequest, sink: Callable[[TokenEvent], None]) -> None:
        self.sinks[request.request_id] = sink

    def abort(self, request_id: str, reason: str) -> None:
        self.aborted.append((request_id, reason))

    def say(self, request_id: str, text: str, finish: str | None = None, **fields: Any) -> None:
        stats = RequestStats(1, 0, 50, 0.0, 0.1, 0.0, 0.0, 0) if finish else None
        self.sinks[request_id](TokenEvent(request_id, list(text.encode()), finish, None, stats, **fields))


def build(core: ListCore, **changes: Any) -> tuple[Generation, list[RequestDone]]:
    fields: dict[str, Any] = {
        "request_id": "r",
        "prompts": [[1, 2]],
        "params": SamplingParams(max_tokens=99),
        "n": 1,
        "stops": [],
        "digest": None,
        "tenant_id": "t",
        "deadline_s": 60.0,
        "continues_prompt": True,
    }
    writer = changes.pop("writer", None)
    generation, closed = Generation(core, GenerationSpec(**fields | changes), TABLE, writer), []
    generation.on_closed = closed.append
    generation.start()
    return generation, closed


async def test_a_core_that_never_answers_an_abort_cannot_hold_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    core = ListCore()
    for stops, text, finish in ((["b"], "ab", "stop"), ([], "ab", "abort")):
        core.aborted.clear()
        generation, closed = build(core, stops=stops)
        core.say("r-0", text)
        if finish == "abort":
            generation.cancel()
            generation.cancel()
        done = await asyncio.wait_for(generation.settle(), 30)
        assert (done.finish, done.completion_tokens, closed) == (finish, 2, [done])
        assert core.aborted == [("r-0", finish)]


async def test_a_stop_string_aborts_once_whatever_the_core_says_until_it_knows() -> None:
    core = ListCore()
    generation, closed = build(core, stops=["b"])
    for text in ("ab", "ab", "b"):
        core.say("r-0", text)
    core.say("r-0", "", "abort")
    assert core.aborted == [("r-0", "stop")]
    assert [(done.finish, done.completion_tokens) for done in closed] == [("stop", 2)]
    assert generation.error is None


async def test_what_a_core_says_after_all_is_too_late_to_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    core = ListCore()
    generation, closed = build(core)
    core.say("r-0", "ab")
    generation.cancel()
    done = await asyncio.wait_for(generation.settle(), 30)
    core.say("r-0", "cd", "abort")
    assert closed == [done] == [generation.done()]
    assert done.completion_tokens == 2


async def test_a_request_that_is_ended_before_its_first_token_costs_nothing() -> None:
    core = ListCore()
    generation, closed = build(core)
    generation.cancel()
    stats = RequestStats(2, 1, 0, 0.0, 0.5, 0.0, 0.0, 0, load_bytes=64)
    core.sinks["r-0"](TokenEvent("r-0", [], "abort", None, stats))
    assert (closed[0].prompt_tokens, closed[0].cached_tokens, closed[0].load_bytes) == (0, 0, 0)
    assert closed[0].prefill_s == 0.5


@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize("code", [ReplicaFailedError.code, "queue_full"])
async def test_what_another_engine_may_answer_is_charged_only_there(code: str, *, is_answered: bool) -> None:
    core = ListCore()
    generation, closed = build(core)
    core.say("r-0", "abc")
    generation.is_answered = is_answered
    gone = ErrorInfo(code, "Try another one.")
    core.sinks["r-0"](TokenEvent("r-0", [], "error", gone))
    assert (closed[0].finish, closed[0].is_charged) == ("error", is_answered)
    assert (closed[0].completion_tokens, closed[0].prompt_tokens) == ((3, 2) if is_answered else (0, 0))


async def test_tokens_behind_a_stop_string_are_neither_sent_nor_counted() -> None:
    core = ListCore()
    generation, closed = build(core, stops=["STOP"])
    core.say("r-0", "one STOP two")
    core.say("r-0", " three")
    core.say("r-0", "", "abort")
    [update] = [item for batch in [batch async for batch in generation.updates()] for item in batch]
    assert (update.text, update.finish) == ("one ", "stop")
    assert closed[0].completion_tokens == len("one STOP")
    assert generation.num_discarded == 50 - len("one STOP")


async def test_one_failed_choice_fails_the_request_and_frees_the_others() -> None:
    core = ListCore()
    generation, closed = build(core, n=3)
    core.say("r-0", "", "error")
    with pytest.raises(ReplicaFailedError):
        [batch async for batch in generation.updates()]
    assert core.aborted == [("r-1", "abort"), ("r-2", "abort")]
    assert closed == []
    core.say("r-1", "", "abort")
    core.say("r-2", "", "abort")
    assert [done.finish for done in closed] == ["error"]


async def test_text_that_nobody_takes_is_bounded() -> None:
    core = ListCore()
    generation, _ = build(core)
    generation.max_pending_bytes = 10 * (64 + 1)
    core.say("r-0", "x" * 10)
    assert generation.error is None
    core.say("r-0", "x")
    assert isinstance(generation.error, ClientGoneError)
    assert core.aborted == [("r-0", "abort")]


async def test_log_probabilities_that_nobody_takes_count_too() -> None:
    core = ListCore()
    generation, _ = build(core, writer=CompletionLogprobs())
    generation.max_pending_bytes = 2 * (64 + 1)
    core.say("r-0", "x", logprobs=[TokenLogprobs(-1.0)])
    assert isinstance(generation.error, ClientGoneError)


async def test_choices_share_one_bound() -> None:
    core = ListCore()
    generation, _ = build(core, n=2)
    generation.max_pending_bytes = 6 * (64 + 1)
    core.say("r-0", "xxxx")
    core.say("r-1", "xx")
    assert generation.error is None
    core.say("r-1", "x")
    assert isinstance(generation.error, ClientGoneError)


async def test_cancelling_what_has_ended_does_nothing() -> None:
    core = ListCore()
    generation, closed = build(core)
    core.say("r-0", "hi", "stop")
    generation.cancel()
    assert (core.aborted, generation.error, closed[0].finish, closed[0].completion_tokens) == ([], None, "stop", 50)


async def test_updates_do_not_depend_on_when_they_are_taken() -> None:
    core = ListCore()
    generation, _ = build(core, n=2)
    core.say("r-1", "b1")
    core.say("r-0", "a1")
    core.say("r-0", "a2", "length")
    core.say("r-1", "b2", "stop")
    batches = [[(item.index, item.text, item.finish) for item in batch] async for batch in generation.updates()]
    assert batches == [[(0, "a1a2", "length"), (1, "b1b2", "stop")]]


@pytest.mark.parametrize(("stops", "finish"), [([], "tool_calls"), (["sl"], "stop"), (["</tool"], "tool_calls")])
async def test_answer_with_half_a_call_has_not_ended_with_calls(stops: list[str], finish: str) -> None:
    core = ListCore()
    plan = ToolPlan(FORMATS["hermes"], ("f",), is_required=False, grammar=None, visible=frozenset())
    generation, _ = build(core, stops=stops, plan=plan)
    core.say("r-0", '<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}</tool_call>', "stop")
    [update] = [item for batch in [batch async for batch in generation.updates()] for item in batch]
    assert (update.finish, len(update.calls)) == (finish, 1)
