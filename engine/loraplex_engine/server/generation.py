"""All choices of one HTTP request, from the first message to the core until the last one from it.

`Generation` is written by the core's events (`_receive`), by its deadline and by whoever cancels it; the answer only
reads `updates`. Whatever happens, it closes within `CLOSE_TIMEOUT_S` of its end and files one `RequestDone`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec

from loraplex_engine.errors import (
    ClientGoneError,
    DeadlineError,
    EngineError,
    GrammarError,
    InvocationMissingError,
    ReplicaFailedError,
    RequestError,
    TooLargeForCacheError,
)
from loraplex_engine.server.choice import Choice, Update
from loraplex_engine.server.detokenizer import Detokenizer
from loraplex_engine.server.echo import PromptPart
from loraplex_engine.server.logprob import LogprobWriter
from loraplex_engine.server.tool.delta import ToolReader
from loraplex_engine.token_table import TokenTable
from loraplex_engine.wire.done import BASE_DIGEST, PASSING_CODES, RequestDone
from loraplex_engine.wire.messages import AddRequest, ErrorInfo, SamplingParams, TokenEvent

CLOSE_TIMEOUT_S = 5.0
MAX_PENDING_BYTES = 1 << 20
"""Of one stream: text and log-probabilities that its client has not taken."""
_FINISH_ORDER = ("error", "abort", "length", "stop")


class Core(Protocol):
    """What a generation needs of the core process."""

    def add(self, request: AddRequest, sink: Callable[[TokenEvent], None]) -> None:
        """Start one request; its events go to `sink` until one has `finish`. Raises if the core cannot take it."""

    def abort(self, request_id: str, reason: str) -> None:
        """End one request soon; its last event still comes."""


class CallPlan(Protocol):
    """What a generation needs to know of tools."""

    @property
    def visible(self) -> frozenset[int]:
        """Special tokens that are text to the reader."""

    def build_reader(self) -> ToolReader:
        """Return what reads the calls of one choice."""


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to generate: `n` choices for each of `prompts`."""

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    """Without a choice number."""
    n: int
    stops: Sequence[str]
    digest: str | None
    tenant_id: str
    deadline_s: float
    priority: int = 0
    """Lower goes first."""
    weight: int = 1
    """Of the tenant."""
    prompt_param: str = "prompt"
    """The field that an error about the prompt names."""
    continues_prompt: bool = False
    """Whether the answer goes on where the prompt ends, so that its first space counts."""
    parts: Sequence[PromptPart] = ()
    """What the answers say of each prompt, if anything."""
    plan: CallPlan | None = None
    """How the answers call tools; None: they do not."""
    grammar_param: str | None = None
    """The field that an error about the grammar names."""
    cache_salt: str = ""


def build_error(info: ErrorInfo) -> RequestError:
    """Return the core's error as an exception with its code."""
    error = RequestError(info.message)
    error.code, error.retry_after_s = info.code, info.retry_after_s
    return error


class Generation:
    """One request of a client: `start` it, read `updates`, and `done` says what it cost."""

    def __init__(
        self, core: Core, spec: GenerationSpec, table: TokenTable, writer: LogprobWriter | None = None
    ) -> None:
        self.spec = spec
        self.table = table
        self.error: EngineError | None = None
        self.max_pending_bytes: int | None = None
        self.is_answered = False
        """Whether the client has been told anything of it."""
        self.on_closed: Callable[[RequestDone], None] = lambda _: None
        self._core = core
        self._wake = asyncio.Event()
        self._closed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._is_ending = False
        self._done: RequestDone | None = None
        # what the choices have that was not taken
        self._pending_bytes = 0
        self._choices = [
            _build_choice(index, request, spec, table, writer) for index, request in enumerate(_build_requests(spec))
        ]
        self._id_to_choice = {choice.request.request_id: choice for choice in self._choices}

    def start(self) -> None:
        """Hand all choices to the core.

        Raises:
            EngineError: The core cannot take them now.
        """
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.spec.deadline_s, self.fail, DeadlineError())
        try:
            for choice in self._choices:
                self._core.add(choice.request, self._receive)
        except EngineError as error:
            self.fail(error)
            self._close()
            raise

    async def updates(self) -> AsyncIterator[list[Update]]:
        """Yield what is new, as often as tokens arrive (maybe without text), until every choice has ended.

        Raises:
            EngineError: The request failed or was cancelled; nothing more comes.
        """
        num_open = len(self._choices)
        while num_open:
            await self._wake.wait()
            self._wake.clear()
            if self.error is not None:
                raise self.error
            updates = [update for choice in self._choices if (update := choice.take())]
            self._pending_bytes = 0
            num_open -= sum(update.finish is not None for update in updates)
            yield updates

    async def settle(self) -> RequestDone:
        """Wait until the core has let go of every choice (bounded) and return what the request cost."""
        await self._closed.wait()
        return self.done()

    def fail(self, error: EngineError) -> None:
        """End the request with an error, unless its text is complete; the core frees what is left of it."""
        if self.error is None and not all(choice.is_complete for choice in self._choices):
            self.error = error
            for choice in self._choices:
                choice.mute()
            self._wake.set()
        self._let_go()

    def cancel(self, reason: str | None = None) -> None:
        """End the request because nobody reads it any more. Has no effect on one that has ended."""
        if not self._closed.is_set():
            self.fail(ClientGoneError(reason))

    def done(self) -> RequestDone:
        """Return what the request has cost so far; final once closed, whatever the core says later."""
        return self._done or self._count()

    @property
    def num_discarded(self) -> int:
        """Tokens that were sampled behind a stop string."""
        stats = [(choice.stats, choice.num_tokens) for choice in self._choices]
        return sum(max(0, item.completion_tokens - counted) for item, counted in stats if item is not None)

    def _count(self) -> RequestDone:
        stats = [choice.stats for choice in self._choices if choice.stats is not None]
        finish = self._finish()
        # the client knows nothing of it, and another engine may answer: what was sampled until then is nobody's
        is_passing = self.error is not None and self.error.code in PASSING_CODES and not self.is_answered
        num_tokens = 0 if is_passing else sum(choice.num_tokens for choice in self._choices)
        is_free = not num_tokens and finish in ("error", "abort")
        return RequestDone(
            request_id=self.spec.request_id,
            prompt_tokens=0 if is_free else sum(map(len, self.spec.prompts)),
            cached_tokens=0 if is_free else self._cached_tokens(),
            completion_tokens=num_tokens,
            queue_s=max((item.queue_s for item in stats), default=0.0),
            prefill_s=max((item.prefill_s for item in stats), default=0.0),
            load_s=max((item.load_s for item in stats), default=0.0),
            decode_s=max((item.decode_s for item in stats), default=0.0),
            preemptions=sum(item.preemptions for item in stats),
            finish=finish,
            digest=self.spec.digest or BASE_DIGEST,
            load_bytes=0 if is_free else sum(item.load_bytes for item in stats),
        )

    def _receive(self, event: TokenEvent) -> None:
        """Take one event of the core; a stop string ends that choice, an error ends all."""
        choice = self._id_to_choice[event.request_id]
        before = choice.pending_bytes
        if choice.feed(event):
            self._core.abort(event.request_id, "stop")
        self._pending_bytes += choice.pending_bytes - before
        self._wake.set()
        if self.max_pending_bytes is not None and self._pending_bytes > self.max_pending_bytes:
            self.fail(ClientGoneError("The client reads too slowly; the request was aborted."))
        if choice.finish is not None:
            self._note_end(choice, event)

    def _note_end(self, choice: Choice, event: TokenEvent) -> None:
        """Draw the consequences of an event of a choice that has ended."""
        if event.finish in ("error", "abort") and self.error is None and choice.finish == event.finish:
            self.fail(self._build_error(event.error) if event.error else ReplicaFailedError())
        if all(choice.is_closed for choice in self._choices):
            self._close()
        elif all(choice.is_complete for choice in self._choices):
            self._end_soon()

    def _build_error(self, info: ErrorInfo) -> RequestError:
        """Return the core's error with the field at fault, which the core cannot know."""
        error = build_error(info)
        if info.code == GrammarError.code:
            error.param = self.spec.grammar_param
        elif info.code in (TooLargeForCacheError.code, InvocationMissingError.code):
            error.param = self.spec.prompt_param
        return error

    def _let_go(self) -> None:
        """Abort what still runs, once, and close by force if the core does not answer."""
        if self._is_ending:
            return
        for choice in self._choices:
            if not choice.is_closed:
                self._core.abort(choice.request.request_id, "abort")
        self._end_soon()

    def _end_soon(self) -> None:
        """Close by force if the core has not let go of every choice in time."""
        if self._is_ending:
            return
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._close)

    def _close(self) -> None:
        if self._closed.is_set():
            return
        self._is_ending = True
        if self._timer is not None:
            self._timer.cancel()
        self._done = self._count()
        self._closed.set()
        self.on_closed(self._done)

    def _finish(self) -> str:
        if isinstance(self.error, ClientGoneError):
            return "abort"
        if self.error is not None:
            return "error"
        found = {choice.finish for choice in self._choices}
        return next((finish for finish in _FINISH_ORDER if finish in found), "") if None not in found else ""

    def _cached_tokens(self) -> int:
        """Cached tokens of each prompt once: choices of one prompt may find their siblings' blocks, so the least."""
        total = 0
        for start in range(0, len(self._choices), self.spec.n):
            stats = [choice.stats for choice in self._choices[start : start + self.spec.n]]
            total += min((item.cached_tokens for item in stats if item is not None), default=0)
        return total


def _build_choice(
    index: int, request: AddRequest, spec: GenerationSpec, table: TokenTable, writer: LogprobWriter | None
) -> Choice:
    part = spec.parts[index // spec.n] if spec.parts else None
    visible = frozenset() if spec.plan is None else spec.plan.visible
    detokenizer = (
        Detokenizer(table, strips_leading_space=not spec.continues_prompt, visible=visible)
        if part is None or part.text is None
        else part.build_detokenizer(table)
    )
    reader = None if spec.plan is None else spec.plan.build_reader()
    return Choice(index, request, detokenizer, spec.stops, writer=writer, reader=reader, prompt=part)


def _build_requests(spec: GenerationSpec) -> list[AddRequest]:
    pairs = [(prompt, choice) for prompt in spec.prompts for choice in range(spec.n)]
    return [
        AddRequest(
            request_id=f"{spec.request_id}-{index}",
            prompt_ids=prompt,
            params=_build_params(spec.params, choice),
            digest=spec.digest,
            tenant_id=spec.tenant_id,
            deadline_s=spec.deadline_s,
            priority=spec.priority,
            weight=spec.weight,
            cache_salt=spec.cache_salt,
        )
        for index, (prompt, choice) in enumerate(pairs)
    ]


def _build_params(params: SamplingParams, choice: int) -> SamplingParams:
    """Return one choice's; only the first scores the prompt, for all."""
    return msgspec.structs.replace(params, choice=choice, prompt_logprobs=None if choice else params.prompt_logprobs)
