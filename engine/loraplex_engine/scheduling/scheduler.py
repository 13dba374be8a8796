"""Plans every step anew. `Scheduler` is the only writer of requests and of the block pool; it never sees a tensor.

There is no prefill or decode phase: each request catches up its computed tokens with its tokens, under one token
budget, running requests first. A waiting request whose adapter is not ready is passed over, never in the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loraplex_engine.core.request import NO_SLOT, Request
from loraplex_engine.core.step import PlannedRow, StepPlan, StepResult
from loraplex_engine.errors import (
    DeadlineError,
    DrainingError,
    InvocationMissingError,
    LoadTimeoutError,
    OutputInvalidError,
    QueueFullError,
    RequestError,
    StepFailedError,
    TooLargeForCacheError,
)
from loraplex_engine.kv.pool import BlockPool, chain_hash, enter_adapter, prefix_seed
from loraplex_engine.lora.residency import Residency
from loraplex_engine.scheduling.turns import Turns
from loraplex_engine.wire.messages import ErrorInfo, TokenEvent, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step and a wait; tokens and seconds."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    queue_timeout_s: float
    adapter_load_timeout_s: float
    enable_prefix_caching: bool = True
    max_waiting: int = 1024
    """Requests that may wait; the next one is told that the queue is full."""


class Scheduler:
    """Requests of one engine: waiting ones in order of arrival, running ones in order of admission."""

    def __init__(
        self,
        pool: BlockPool,
        residency: Residency,
        limits: Limits,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._residency = residency
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self.turns = Turns(residency, clock)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.is_draining = False
        self._ended: list[TokenEvent] = []
        self._id_to_request: dict[str, Request] = {}
        self._token_gaps: list[float] = []

    @property
    def max_step_tokens(self) -> int:
        """Most tokens that one step computes."""
        return self._limits.max_num_batched_tokens

    # requests in and out

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFullError: Too many requests wait already.
            TooLargeForCacheError: It could never fit into the KV pool.
            DrainingError: The engine takes no new requests.
            LoadFailedError, DigestMismatchError: Its adapter lately failed to load.
            AdapterQuarantinedError: Its adapter is not served here any more.
        """
        if self.is_draining:
            raise DrainingError
        failure = self._residency.find_failure(request.digest) if request.digest else None
        if failure is not None:
            raise failure
        if len(self.waiting) >= self._limits.max_waiting:
            raise QueueFullError("The engine's queue is full; try again later.")
        if self._pool.blocks_for(request.max_num_tokens) > self._pool.num_blocks:
            raise TooLargeForCacheError
        assert request.request_id not in self._id_to_request
        request.arrived_at = self._clock()
        self._id_to_request[request.request_id] = request
        if request.digest is not None:
            self._residency.hold(request.digest)
            self.turns.note_wanted(request.digest)
        self.waiting.append(request)

    def abort(self, request_id: str, reason: str) -> TokenEvent | None:
        """End a request now and give back all that it holds; None if it is not here (any more)."""
        request = self._id_to_request.get(request_id)
        return None if request is None else self._finish(request, reason)

    def fail(self, request_id: str, error: RequestError) -> TokenEvent | None:
        """End a request now with an error; None if it is not here (any more)."""
        request = self._id_to_request.get(request_id)
        return None if request is None else self._fail(request, error)

    def fail_waiting(self, digest: str, error: RequestError) -> list[TokenEvent]:
        """End the waiting requests of an adapter that could not be loaded, or is not served any more."""
        doomed = [request for request in self.waiting if request.digest == digest]
        return [self._fail(request, error) for request in doomed]

    def fail_plan(self, plan: StepPlan, error: RequestError) -> list[TokenEvent]:
        """End the requests of a step that could not be computed; nothing of it has entered the prefix index."""
        return [self._fail(row.request, error) for row in plan.rows]

    def expire(self) -> list[TokenEvent]:
        """End requests whose time is over: the deadline, the wait for a turn, the wait for an adapter."""
        now = self._clock()
        events = []
        for request in [*self.waiting, *self.running]:
            error = self._find_expiry(request, now)
            if error is not None:
                events.append(self._fail(request, error))
        return events

    # one step

    def schedule(self) -> StepPlan:
        """Choose the tokens of the next step; an empty plan when nothing can run now."""
        budget = self._limits.max_num_batched_tokens
        lone_row = self._find_lone_row()
        if lone_row is not None:
            return StepPlan([lone_row])
        rows = self._continue_running(budget)
        rows += self._admit_waiting(budget - sum(row.num_tokens for row in rows))
        ended, self._ended = self._ended, []
        return StepPlan(rows, ended)

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in what a step computed; returns the tokens and endings to tell."""
        events = []
        for row in plan.rows:
            row.request.num_computed = row.stop
            if row.request.request_id in result.invalid:
                error = OutputInvalidError() if row.request.digest is not None else StepFailedError()
                events.append(self._fail(row.request, error))
            elif row.samples:
                # the finite logits of its last token vouch for all blocks before it
                self._publish_blocks(row.request)
                request_id = row.request.request_id
                events.append(
                    self._append_token(row.request, result.sampled[request_id], result.logprobs.get(request_id))
                )
            elif row.request.wants_logits and row.request.num_uncomputed == 0:
                events.append(self._finish(row.request, "stop"))
        return events

    def take_token_gaps(self) -> list[float]:
        """Seconds between tokens of a request, for all tokens since the last call."""
        gaps, self._token_gaps = self._token_gaps, []
        return gaps

    def check_integrity(self) -> None:
        """Assert that blocks and pins held by requests are exactly those that the pool and the slots know."""
        self._pool.check_integrity()
        self._residency.check_integrity()
        assert {*self.waiting, *self.running} == set(self._id_to_request.values())
        assert not any(r.block_ids or r.slot != NO_SLOT for r in self.waiting)
        held = {block_id for request in self.running for block_id in request.block_ids}
        assert len(held) == self._pool.num_blocks - self._pool.num_free
        pins = Counter(r.slot for r in self.running if r.slot != NO_SLOT)
        for slot_id, slot in enumerate(self._residency.slots.slots):
            assert slot.num_pins == pins[slot_id]
            assert all(r.digest == slot.digest for r in self.running if r.slot == slot_id)
        holds = Counter(r.digest for r in self._id_to_request.values() if r.digest is not None)
        assert holds == self._residency.held_digests

    # catching up

    def _continue_running(self, budget: int) -> list[PlannedRow]:
        """Rows of running requests, those that decode first; preempts the youngest when blocks run out."""
        rows: list[PlannedRow] = []
        for request in sorted(self.running, key=lambda r: r.num_uncomputed > 1):
            num_tokens = min(request.num_uncomputed, budget)
            if num_tokens == 0 or request not in self.running:
                continue
            if not self._make_room(request, num_tokens, rows):
                continue
            rows.append(self._plan_row(request, num_tokens))
            budget -= num_tokens
        return rows

    def _make_room(self, request: Request, num_tokens: int, rows: list[PlannedRow]) -> bool:
        """Give the request blocks for its next tokens, at the cost of younger ones; False if it was the youngest."""
        while not self._try_grow(request, num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            rows[:] = [row for row in rows if row.request is not victim]
            if victim is request:
                return False
        return True

    def _try_grow(self, request: Request, num_tokens: int) -> bool:
        missing = self._pool.blocks_for(request.num_computed + num_tokens) - len(request.block_ids)
        block_ids = self._pool.try_allocate(max(0, missing))
        if block_ids is None:
            return False
        request.block_ids += block_ids
        return True

    def _preempt(self, request: Request) -> None:
        """Take back everything from a running request and let it start over, ahead of the queue."""
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        request.preemptions += 1
        self.num_preemptions += 1
        self.waiting.insert(0, request)

    # admission

    def _admit_waiting(self, budget: int) -> list[PlannedRow]:
        rows: list[PlannedRow] = []
        self._residency.want(request.digest for request in self.waiting if request.digest is not None)
        self.turns.plan(self.waiting)
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._limits.max_num_seqs:
                break
            if request.is_lone or (request.digest is not None and not self._is_adapter_ready(request)):
                continue
            if not self._has_room(request):
                break
            if not self._try_place_adapter(request):
                continue
            row = self._admit(request, budget)
            budget -= row.num_tokens
            rows.append(row)
        return rows

    def _has_room(self, request: Request) -> bool:
        """Whether the pool could hold all tokens that the request has so far, beside those that run."""
        return self._pool.blocks_for(request.num_tokens) <= self._pool.num_free

    def _find_lone_row(self) -> PlannedRow | None:
        """Admit a request that must be alone in its step; the others stand still for that one."""
        request = next((request for request in self.waiting if request.is_lone), None)
        if request is None or not self._has_room(request):
            return None
        if request.digest is not None and not self._is_adapter_ready(request):
            return None
        return self._admit(request, request.num_tokens) if self._try_place_adapter(request) else None

    def _is_adapter_ready(self, request: Request) -> bool:
        now = self._clock()
        if not self.turns.try_start(request):
            request.load_wait_at = now if request.load_wait_at is None else request.load_wait_at
            return False
        if request.load_wait_at is not None:
            request.load_s += now - request.load_wait_at
            request.load_wait_at = None
        return True

    def _try_place_adapter(self, request: Request) -> bool:
        """Find where in its prompt the request's adapter begins to act; False, and the request ended, if nowhere."""
        if request.digest is None:
            return True
        invocation_ids = self._residency.facts(request.digest).invocation_ids
        start = find_last(request.prompt_ids, invocation_ids)
        if start is None:
            self._ended.append(self._fail(request, InvocationMissingError.of(invocation_ids)))
            return False
        request.adapter_start = start
        return True

    def _admit(self, request: Request, budget: int) -> PlannedRow:
        self.waiting.remove(request)
        self.running.append(request)
        if request.digest is not None:
            slot = self._residency.try_pin(request.digest)
            assert slot is not None
            request.slot = slot
        if request.started_at is None:
            request.started_at = self._clock()
        self._take_cached_prefix(request)
        num_tokens = min(request.num_uncomputed, budget)
        has_grown = self._try_grow(request, num_tokens)
        assert has_grown
        return self._plan_row(request, num_tokens)

    def _take_cached_prefix(self, request: Request) -> None:
        """Start from the blocks of a known prefix; at least one token is left to compute, for its logits."""
        if request.wants_logits or request.is_lone or not self._limits.enable_prefix_caching:
            return
        full_blocks = (request.num_tokens - 1) // self._pool.block_size
        self._extend_hashes(request, full_blocks)
        block_ids = self._pool.find_prefix(request.block_hashes[:full_blocks])
        self._pool.share(block_ids)
        request.block_ids = list(block_ids)
        request.num_published = len(block_ids)
        request.num_computed = len(block_ids) * self._pool.block_size
        if request.preemptions == 0:
            request.num_cached = request.num_computed
            self.num_prefix_queries += len(request.prompt_ids)
            self.num_prefix_hits += request.num_cached

    def _plan_row(self, request: Request, num_tokens: int) -> PlannedRow:
        samples = num_tokens == request.num_uncomputed and not request.wants_logits
        return PlannedRow(request, request.num_computed, num_tokens, samples)

    # results

    def _publish_blocks(self, request: Request) -> None:
        """Enter blocks that have become full into the prefix index."""
        if request.is_lone or not self._limits.enable_prefix_caching:
            return
        full_blocks = request.num_computed // self._pool.block_size
        self._extend_hashes(request, full_blocks)
        for index in range(request.num_published, full_blocks):
            self._pool.publish(request.block_ids[index], request.block_hashes[index])
        request.num_published = full_blocks

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        """Chain the hashes of full blocks; those that end before the adapter acts are the base's."""
        size = self._pool.block_size
        hashes = request.block_hashes
        for index in range(len(hashes), num_blocks):
            previous = hashes[-1] if hashes else prefix_seed(request.tenant_id)
            if request.digest is not None and index == request.adapter_start // size:
                previous = enter_adapter(previous, request.digest, request.adapter_start)
            hashes.append(chain_hash(previous, request.token_ids(index * size, (index + 1) * size)))

    def _append_token(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        now = self._clock()
        if request.last_token_at is None:
            request.first_token_at = now
        else:
            self._token_gaps.append(now - request.last_token_at)
        request.last_token_at = now
        request.output_ids.append(token_id)
        reason, is_hidden = self._find_ending(request, token_id)
        token_ids = [] if is_hidden else [token_id]
        told = [] if is_hidden or logprobs is None else [logprobs]
        if reason is None:
            return TokenEvent(request.request_id, token_ids, logprobs=told)
        return self._finish(request, reason, token_ids, told)

    def _find_ending(self, request: Request, token_id: int) -> tuple[str | None, bool]:
        """Reason to end after this token, and whether the token itself is withheld from the text."""
        params = request.params
        if len(request.output_ids) > params.min_tokens:
            is_eos = token_id in self._eos_token_ids and not params.ignore_eos
            if is_eos or token_id in params.stop_token_ids:
                return "stop", True
        if len(request.output_ids) >= params.max_tokens or request.num_tokens >= self._limits.max_model_len:
            return "length", False
        return None, False

    def _finish(
        self, request: Request, reason: str, token_ids: Sequence[int] = (), logprobs: Sequence[TokenLogprobs] = ()
    ) -> TokenEvent:
        self._remove(request)
        stats = request.stats(self._clock())
        return TokenEvent(request.request_id, [*token_ids], reason, stats=stats, logprobs=[*logprobs])

    def _fail(self, request: Request, error: RequestError) -> TokenEvent:
        self._remove(request)
        info = ErrorInfo(error.code, str(error), error.retry_after_s)
        return TokenEvent(request.request_id, [], "error", info, request.stats(self._clock()))

    def _remove(self, request: Request) -> None:
        del self._id_to_request[request.request_id]
        (self.running if request in self.running else self.waiting).remove(request)
        self._release(request)
        if request.digest is not None:
            self.turns.note_ended(request)
            self._residency.let_go(request.digest)

    def _release(self, request: Request) -> None:
        self._pool.free(request.block_ids)
        request.block_ids = []
        request.num_published = 0
        if request.slot != NO_SLOT:
            self._residency.unpin(request.slot)
            request.slot = NO_SLOT

    def _find_expiry(self, request: Request, now: float) -> RequestError | None:
        is_queued = request.started_at is None
        if now >= request.deadline_at:
            return QueueFullError() if is_queued else DeadlineError()
        if not is_queued:
            return None
        if request.load_wait_at is not None:
            waited_s = now - request.load_wait_at
            return LoadTimeoutError() if waited_s >= self._limits.adapter_load_timeout_s else None
        return QueueFullError() if now - request.arrived_at >= self._limits.queue_timeout_s else None


def find_last(token_ids: list[int], wanted: Sequence[int]) -> int | None:
    """Position of the last occurrence of `wanted` in `token_ids`, 0 for nothing wanted, None if there is none."""
    if not wanted:
        return 0
    pattern = list(wanted)
    for start in range(len(token_ids) - len(pattern), -1, -1):
        if token_ids[start] == pattern[0] and token_ids[start : start + len(pattern)] == pattern:
            return start
    return None
