"""Measurements of parity in the core's loop: one at a time, in stages that never hold up a step.

A measurement loads the adapter as a request would, lets the engine score the golden prompts beside whatever runs, one
prompt at a time and behind all others, and has a process of its own compute what the logits should be.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from loraplex_engine.core.request import Request
from loraplex_engine.engine import Engine, LogitSink
from loraplex_engine.errors import DeadlineError, LoadTimeoutError, QueueFullError, RequestError, StepFailedError
from loraplex_engine.lora.worker import WorkerLaunch
from loraplex_engine.parity.job import Difference, ParityDone, ParityFailed, ParityJob
from loraplex_engine.parity.limit import judge
from loraplex_engine.parity.process import ReferenceProcess
from loraplex_engine.parity.prompts import build_prompts
from loraplex_engine.wire.messages import ErrorInfo, MeasureParity, Reply, SamplingParams, TokenEvent

PARITY_TIMEOUT_S = 300.0
"""From the call to its answer, the wait for others included."""
_MAX_CALLS = 32
_MAX_KNOWN_BASES = 64
_BEHIND_ALL = 1 << 20
_WEIGHT = 0.1
"""Of the platform as a tenant: a tenth of what any other may have."""
_MAX_CHUNK = 8
"""Tokens of a golden prompt in a step: each costs a row of the head, which the budget of a step does not know of."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ids = itertools.count(1)


class _Logits:
    """The engine's logits in a nameless file that another process can read: [rows, V] in the model's dtype."""

    def __init__(self, num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
        self.descriptor = os.memfd_create("logits")
        try:
            os.truncate(self.descriptor, num_rows * vocab_size * dtype.itemsize)
            self._map = mmap.mmap(self.descriptor, 0)
        except OSError:
            os.close(self.descriptor)
            raise
        self._rows = torch.frombuffer(self._map, dtype=dtype).view(num_rows, vocab_size)

    def sink(self, first_row: int) -> LogitSink:
        """Where the logits of one prompt go."""

        def take(start: int, logits: Tensor) -> None:
            begin = first_row + start
            self._rows[begin : begin + len(logits)] = logits

        return take

    def close(self) -> None:
        """Give the memory back."""
        del self._rows
        os.close(self.descriptor)


@dataclass
class _Measurement:
    """The one that is under way."""

    call: MeasureParity
    load_by: float
    prompts: list[list[int]] = field(default_factory=list)
    has_base: bool = False
    logits: _Logits | None = None
    unscored: list[tuple[str | None, list[int], int]] = field(default_factory=list)
    """Digest, prompt and first row of what is still to be scored, the last first."""
    open_ids: set[str] = field(default_factory=set)
    process: ReferenceProcess | None = None


class ParityCalls:
    """Pending and current `MeasureParity` calls of one core.

    Args:
        engine: scores the prompts.
        launch: what the process that computes references is told, as the loader is.
        load_timeout_s: how long an adapter may take to load.
        clock: monotonic seconds.
    """

    def __init__(self, engine: Engine, launch: WorkerLaunch, load_timeout_s: float, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._launch = launch
        self._load_timeout_s = load_timeout_s
        self._clock = clock
        self._waiting: deque[tuple[MeasureParity, float]] = deque()
        self._current: _Measurement | None = None
        self._deadline = 0.0
        self._refused: list[Reply] = []
        self._base_differences: dict[tuple[tuple[int, ...], ...], Difference] = {}

    @property
    def is_pending(self) -> bool:
        """Whether a call waits for its answer."""
        return self._current is not None or bool(self._waiting or self._refused)

    @property
    def is_computing(self) -> bool:
        """Whether a reference is computed at the moment, with what the steps leave over."""
        return self._current is not None and self._current.process is not None

    def add(self, call: MeasureParity) -> None:
        """Queue a call."""
        if len(self._waiting) >= _MAX_CALLS:
            self._refused.append(_refuse(call, QueueFullError("Too many adapters wait to be measured; try again.")))
        else:
            self._waiting.append((call, self._clock() + PARITY_TIMEOUT_S))

    def cancel(self, call_id: int) -> None:
        """Forget a call, and stop it if it is the current one."""
        self._waiting = deque(entry for entry in self._waiting if entry[0].call_id != call_id)
        if self._current is not None and self._current.call.call_id == call_id:
            self._end()

    def take(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Take out of a step's events those of golden prompts; returns the others."""
        if self._current is None:
            return events
        own = [event for event in events if event.request_id in self._current.open_ids]
        for event in own:
            if event.finish is not None and self._current is not None:
                self._current.open_ids.discard(event.request_id)
                self._engine.end_score(event.request_id)
                if event.finish != "length":
                    self._fail(event.error or ErrorInfo(StepFailedError.code, str(StepFailedError())))
        return [event for event in events if event not in own]

    def settle(self) -> list[Reply]:
        """Move the current measurement on, or begin the next; returns the answers of calls that have come to an end."""
        try:
            reply = self._move()
            if reply is not None:
                self._end()
                self._refused.append(reply)
        except RequestError as error:
            self._fail(ErrorInfo(error.code, str(error), error.retry_after_s))
        except OSError as error:
            self._fail(ErrorInfo(StepFailedError.code, f"The reference could not be computed: {error.strerror}."))
        replies, self._refused = self._refused, []
        return replies

    def _move(self) -> Reply | None:
        if self._current is None:
            self._begin_next()
        current = self._current
        if current is None:
            return None
        if self._clock() >= self._deadline:
            raise DeadlineError("The adapter was not measured in time; try again when less runs here.")
        if current.logits is None and not self._try_prepare(current):
            return None
        if not current.open_ids and current.unscored:
            self._score_next(current)
        if current.open_ids or current.unscored:
            return None
        return self._find_answer(current)

    def _begin_next(self) -> None:
        if self._waiting:
            call, self._deadline = self._waiting.popleft()
            self._current = _Measurement(call, self._clock() + self._load_timeout_s)

    def _try_prepare(self, current: _Measurement) -> bool:
        """Lay out the prompts once the adapter is in host memory, and where their logits go."""
        digest, residency, facts = current.call.digest, self._engine.residency, self._engine.facts
        failure = residency.find_failure(digest)
        if failure is not None:
            raise failure
        if not residency.is_in_host(digest):
            if self._clock() >= current.load_by:
                raise LoadTimeoutError
            residency.prefetch(digest)
            return False
        packed = residency.facts(digest)
        trained_ids = sorted({token_id for rows in packed.rows for token_id in rows.token_ids})
        texts, max_len = current.call.texts, min(facts.max_model_len - 1, facts.num_blocks * facts.block_size)
        current.prompts = build_prompts(texts, packed.invocation_ids, trained_ids, max_len)
        current.has_base = _key(current.prompts) not in self._base_differences
        self._lay_out(current)
        return True

    def _lay_out(self, current: _Measurement) -> None:
        num_rows, first = sum(map(len, current.prompts)), 0
        scores: list[tuple[str | None, list[int], int]] = []
        for prompt in current.prompts:
            scores.append((current.call.digest, prompt, first))
            if current.has_base:
                scores.append((None, prompt, num_rows + first))
            first += len(prompt)
        facts = self._engine.facts
        num_kept = num_rows * 2 if current.has_base else num_rows
        current.logits = _Logits(num_kept, facts.vocab_size, _DTYPES[facts.dtype])
        current.unscored = scores[::-1]

    def _score_next(self, current: _Measurement) -> None:
        """Let the engine score the next prompt with the adapter, and beside it the same without where that is new."""
        assert current.logits is not None
        text = current.unscored[-1][1]
        while current.unscored and current.unscored[-1][1] is text:
            digest, prompt, first = current.unscored.pop()
            request = Request(
                f"parity-{next(_ids)}", prompt, SamplingParams(0), digest, priority=_BEHIND_ALL, wants_logits=True
            )
            request.deadline_at, request.max_chunk, request.weight = self._deadline, _MAX_CHUNK, _WEIGHT
            self._engine.begin_score(request, current.logits.sink(first))
            current.open_ids.add(request.request_id)

    def _find_answer(self, current: _Measurement) -> Reply | None:
        """The answer once the reference is there; starts to compute it."""
        assert current.logits is not None
        if current.process is None:
            job = ParityJob(self._launch, current.call.digest, current.prompts, current.has_base)
            current.process = ReferenceProcess(job, current.logits.descriptor)
            return None
        outcome = current.process.poll()
        if outcome is None:
            return None
        if isinstance(outcome, ParityFailed):
            return Reply(current.call.call_id, error=ErrorInfo(StepFailedError.code, outcome.message))
        base = self._find_base(current, outcome)
        result = judge(outcome, base, self._engine.facts.dtype, len(current.prompts))
        return Reply(current.call.call_id, msgspec.structs.asdict(result))

    def _find_base(self, current: _Measurement, done: ParityDone) -> Difference:
        """What the dtype costs the base on these prompts; it is always the same."""
        key, known = _key(current.prompts), self._base_differences
        if done.base is not None:
            known[key] = done.base
            if len(known) > _MAX_KNOWN_BASES:
                del known[next(iter(known))]
        return known[key]

    def _fail(self, error: ErrorInfo) -> None:
        """End the current measurement with an error."""
        assert self._current is not None
        self._refused.append(Reply(self._current.call.call_id, error=error))
        self._end()

    def _end(self) -> None:
        """Give back all that the current measurement holds."""
        current, self._current = self._current, None
        assert current is not None
        for request_id in current.open_ids:
            self._engine.end_score(request_id)
        if current.process is not None:
            current.process.close()
        if current.logits is not None:
            current.logits.close()


def _key(prompts: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, prompts))


def _refuse(call: MeasureParity, error: RequestError) -> Reply:
    return Reply(call.call_id, error=ErrorInfo(error.code, str(error), error.retry_after_s))
