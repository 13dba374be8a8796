"""Plans every step anew. `Scheduler` is the only writer of requests and of the block pool; it never sees a tensor.

There is no prefill or decode phase: each request catches up its computed tokens with its tokens. `schedule` gives every
running request that lacks one token that token, then what is left of the step to prompts, by their tenants' turns, and
of one tenant those of running requests first. `update` takes in what came of it. Who may start is told by `Admission`,
what a request need not compute by `Prefixes`, how much fits into a step by `StepBudget`, who goes first and who must
yield by `policy` and its `FairShare`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from loraplex_engine.core.request import NO_SLOT, Request
from loraplex_engine.core.step import PlannedRow, StepPlan, StepResult
from loraplex_engine.errors import (
    DrainingError,
    OutputInvalidError,
    QueueFullError,
    RequestError,
    StepFailedError,
    TooLargeForCacheError,
)
from loraplex_engine.kv.pool import BlockPool
from loraplex_engine.lora.residency import Residency
from loraplex_engine.scheduling.admission import Admission
from loraplex_engine.scheduling.budget import StepBudget
from loraplex_engine.scheduling.draft import StepDraft
from loraplex_engine.scheduling.endings import find_ending, find_expiry
from loraplex_engine.scheduling.guided import Guided
from loraplex_engine.scheduling.limits import Limits
from loraplex_engine.scheduling.policy import AgeOnly, FairShare, Standing, WaitingLine, choose_victim
from loraplex_engine.scheduling.prefixes import Prefix, Prefixes
from loraplex_engine.wire.messages import NO_SCORES, ErrorInfo, PromptScores, TokenEvent, TokenLogprobs, join_scores


class Scheduler:
    """Requests of one engine: waiting ones, and running ones in the order in which they started."""

    def __init__(
        self,
        pool: BlockPool,
        residency: Residency,
        limits: Limits,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float],
        budget: StepBudget | None = None,
        share: FairShare | None = None,
    ) -> None:
        self.waiting = WaitingLine()
        self.running: dict[Request, None] = {}
        self.prefixes = Prefixes(pool, clock, is_enabled=limits.enable_prefix_caching)
        self.guided = Guided()
        self.num_preemptions = 0
        """Of requests that lost their blocks to running ones."""
        self.running_to_preemptions: Counter[int] = Counter()
        """How many requests ran when one of them lost its blocks, and how often."""
        self.num_yields = 0
        """Of requests that gave their seat or blocks to a waiting one of a tenant below its share."""
        self.num_sampled = 0
        """Tokens of all requests so far, also those that nobody is charged for."""
        self.is_draining = False
        self._pool = pool
        self._residency = residency
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._budget = budget or StepBudget()
        self._share = share or AgeOnly()
        self._admission = Admission(
            pool, residency, self.prefixes, limits, clock, self._refuse, self._make_way, self._share
        )
        self.turns = self._admission.turns
        self._id_to_request: dict[str, Request] = {}
        self._arrivals = itertools.count()
        self._refusals: list[TokenEvent] = []
        self._token_gaps: list[float] = []
        self._draft = StepDraft(0, self._budget)
        self._settled: tuple[Request, ...] = ()
        self._planned_at = 0.0

    @property
    def max_step_tokens(self) -> int:
        """Most tokens that one step computes."""
        return self._limits.max_num_batched_tokens

    @property
    def max_running(self) -> int:
        """Most requests that run at once."""
        return self._limits.max_num_seqs

    @property
    def num_prefix_queries(self) -> int:
        """Prompt tokens that were looked up."""
        return self.prefixes.num_queries

    @property
    def num_prefix_hits(self) -> int:
        """Prompt tokens that were found, and not computed again."""
        return self.prefixes.num_hits

    # requests in and out

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFullError: Too many requests wait already, and the tenant has its share of them.
            TooLargeForCacheError: It could never fit into the KV pool.
            DrainingError: The engine takes no new requests.
            LoadFailedError, DigestMismatchError: Its adapter lately failed to load.
            AdapterQuarantinedError: Its adapter is not served here any more.
            RequestError: It has no tokens: it could never start, and hold back all behind it.
        """
        if not request.prompt_ids:
            raise RequestError("The prompt has no tokens.")
        if self.is_draining:
            raise DrainingError
        failure = self._residency.find_failure(request.digest) if request.digest else None
        if failure is not None:
            raise failure
        max_waiting = self._limits.max_waiting
        if len(self.waiting) >= max_waiting and not self._share.may_queue(request, self.waiting, max_waiting):
            raise QueueFullError("The engine's queue is full; try again later.")
        max_len = max(len(request.prompt_ids) + 1, self._limits.max_model_len)
        if self._pool.blocks_for(min(request.max_num_tokens, max_len)) > self._pool.num_blocks:
            raise TooLargeForCacheError
        assert request.request_id not in self._id_to_request
        request.arrived_at = self._clock()
        request.arrival = next(self._arrivals)
        self._id_to_request[request.request_id] = request
        if request.digest is not None:
            self._residency.hold(request.digest)
            self.turns.note_wanted(request)
        self.waiting.add(request)

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
        self._free_copied()
        return [self._fail(row.request, error) for row in plan.rows]

    def expire(self) -> list[TokenEvent]:
        """End requests whose time is over: the deadline, the wait for a turn, the wait for an adapter."""
        now = self._clock()
        late = [request for request in self.running if now >= request.deadline_at]
        doomed = [(r, error) for r in (*self.waiting, *late) if (error := find_expiry(r, self._limits, now))]
        return [self._fail(request, error) for request, error in doomed]

    def settle_guides(self) -> list[TokenEvent]:
        """End requests whose text is whole by its grammar, or whose grammar cannot be followed."""
        settled = self.guided.settle()
        return [self._fail(request, error) if error else self._finish(request, "stop") for request, error in settled]

    # one step

    def schedule(self) -> StepPlan:
        """Choose the tokens of the next step; an empty plan when nothing can run now."""
        draft = self._draft = StepDraft(self._limits.max_num_batched_tokens, self._budget)
        self._settled = tuple(self.running)
        line = self._admission.line_up(self.waiting)
        if not self._start_lone(line, draft):
            self._continue_decoding(draft)
            draft.open_to_prompts(self._find_prompts(line))
            self._compute_prompts(line, draft)
        refusals, self._refusals = self._refusals, []
        self._planned_at = self._clock()
        return draft.to_plan(refusals)

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in what a step computed; returns the tokens and endings to tell."""
        now = self._clock()
        self._draft.observe(now - self._planned_at)
        if self._draft.block_copies:
            self._free_copied()
        events = [self._take_in(row, result, now) for row in plan.rows]
        return [event for event in events if event is not None]

    def describe_shares(self) -> list[Standing]:
        """How tenants stand that have requests here, those furthest ahead first."""
        standings = self._share.describe(self.waiting, self.running)
        return sorted(standings, key=lambda standing: -standing.lead)

    def take_token_gaps(self) -> list[float]:
        """Seconds between tokens of a request, for all tokens since the last call."""
        gaps, self._token_gaps = self._token_gaps, []
        return gaps

    def check_integrity(self) -> None:
        """Assert that blocks and pins held by requests are exactly those that the pool and the slots know."""
        self._pool.check_integrity()
        self._residency.check_integrity()
        self.prefixes.check_integrity(self.running)
        self.guided.check_integrity(set(self._id_to_request.values()))
        self._share.check_integrity()
        assert len(self.waiting) + len(self.running) == len(self._id_to_request)
        assert {*self.waiting, *self.running} == set(self._id_to_request.values())
        assert not any(r.block_ids or r.slot != NO_SLOT for r in self.waiting)
        copied = [source for source, _ in self._draft.block_copies]
        self._pool.check_holds(Counter(itertools.chain(copied, *(r.block_ids for r in self.running))))
        pins = Counter(r.slot for r in self.running if r.slot != NO_SLOT)
        for slot_id, slot in enumerate(self._residency.slots.slots):
            assert slot.num_pins == pins[slot_id]
            assert all(r.digest == slot.digest for r in self.running if r.slot == slot_id)
        holds = Counter(r.digest for r in self._id_to_request.values() if r.digest is not None)
        assert holds == self._residency.held_digests

    # running requests

    def _continue_decoding(self, draft: StepDraft) -> None:
        """Requests that lack one token get it, whatever it costs."""
        block_size = self._pool.block_size
        for request in list(self.running):
            if not draft.num_left or request.num_uncomputed != 1:
                continue
            if self.guided.num_late and self.guided.is_late(request):
                continue
            has_room = request.num_computed < len(request.block_ids) * block_size
            # as room is made, others yield, also some that are in this list
            if (has_room and not draft.is_short) or self._make_room(request, 1, draft):
                draft.add(request, 1)

    def _find_prompts(self, line: list[Request]) -> list[tuple[int, int]]:
        """First uncomputed position and tokens to compute, of prompts that could take part in the step."""
        num_seats = self._limits.max_num_seqs - len(self.running)
        ready = [r for r in line[:num_seats] if r.load_wait_at is None and not self.prefixes.is_awaiting(r)]
        return [(r.num_computed, r.num_uncomputed) for r in (*self.running, *ready) if r.num_uncomputed > 1]

    def _compute_prompts(self, line: list[Request], draft: StepDraft) -> None:
        """Requests that lack more, and waiting ones that can start, get what fits, by the turns of their tenants."""
        turns = self._continue_prompts(line, draft)
        for request, prefix in self._admission.find_startable(turns, self.running):
            start = self.prefixes.num_tokens(prefix)
            num_tokens = draft.allow(start, min(request.num_tokens - start, request.max_chunk))
            if num_tokens == 0:
                break
            self._start(request, prefix, num_tokens, draft)
        # nobody starts any more, but running requests have their turns
        for _ in turns:
            pass

    def _continue_prompts(self, line: list[Request], draft: StepDraft) -> Iterator[Request]:
        """Compute prompts of running requests between waiting ones; none may start while running ones lack blocks."""
        prompts = {request: None for request in self.running if request.num_uncomputed > 1}
        for request in self._share.merge(list(prompts), line):
            if request not in prompts:
                if draft.num_left and not draft.is_short:
                    yield request
            elif request in self.running:
                num_tokens = draft.allow(request.num_computed, min(request.num_uncomputed, request.max_chunk))
                if num_tokens and self._make_room(request, num_tokens, draft):
                    draft.add(request, num_tokens)

    def _make_room(self, request: Request, num_tokens: int, draft: StepDraft) -> bool:
        """Give a running request blocks for its next tokens, at the cost of others; False if it had to yield itself."""
        missing = self._pool.blocks_for(request.num_computed + num_tokens) - len(request.block_ids)
        if missing <= 0:
            return request in self.running
        while request in self.running:
            block_ids = self._pool.try_allocate(missing)
            if block_ids is not None:
                request.block_ids += block_ids
                return True
            draft.is_short = True
            self.num_preemptions += 1
            self.running_to_preemptions[len(self.running)] += 1
            self._preempt(choose_victim(self.running, request), draft)
        return False

    def _make_way(self, request: Request, num_blocks: int) -> bool:
        """Let a running request yield its seat to a waiting one, or its blocks where that needs so many."""
        settled = [other for other in self._settled if other in self.running]
        if num_blocks:
            victim = self._share.find_holder(request, settled, num_blocks, self._pool.num_blocks)
        else:
            victim = self._share.find_yielding(request, settled, self._limits.max_num_seqs)
        if victim is None:
            return False
        self._preempt(victim, self._draft)
        self._share.note_yield(victim)
        self.num_yields += 1
        return True

    def _preempt(self, request: Request, draft: StepDraft) -> None:
        """Take back everything from a running request and let it start over."""
        draft.give_up(request)
        del self.running[request]
        self.guided.resume(request)
        self.prefixes.publish_tail(request)
        self._release(request)
        request.num_computed = 0
        request.turn_at = self._clock()
        request.preemptions += 1
        self.waiting.add(request)

    # waiting requests

    def _start_lone(self, line: list[Request], draft: StepDraft) -> bool:
        """Start a request that must be alone in its step; the others stand still for that one."""
        request = next((request for request in line if request.is_lone), None)
        if request is None or not self._admission.can_start_alone(request, self.running):
            return False
        self._start(request, Prefix(), request.num_tokens, draft)
        return True

    def _start(self, request: Request, prefix: Prefix, num_tokens: int, draft: StepDraft) -> None:
        self.waiting.remove(request)
        self.running[request] = None
        self.guided.begin(request)
        if request.digest is not None:
            slot = self._residency.try_pin(request.digest)
            assert slot is not None
            request.slot = slot
        self._share.note_start(request, self.prefixes.num_tokens(prefix))
        request.turn_at = self._clock()
        if request.started_at is None:
            request.started_at = request.turn_at
        copy = self.prefixes.take(request, prefix)
        if copy is not None:
            draft.block_copies.append(copy)
        has_room = self._make_room(request, num_tokens, draft)
        assert has_room
        draft.add(request, num_tokens)

    def _refuse(self, request: Request, error: RequestError) -> None:
        self._refusals.append(self._fail(request, error))

    # results

    def _take_in(self, row: PlannedRow, result: StepResult, now: float) -> TokenEvent | None:
        request = row.request
        request_id = request.request_id
        is_late = request_id in result.late
        request.num_computed = row.stop - is_late
        self._share.note_computed(request, row.stop)
        if request_id in result.invalid:
            return self._fail(request, OutputInvalidError() if request.digest is not None else StepFailedError())
        if row.scored:
            scores = result.prompt_logprobs[request_id]
            request.prompt_logprobs.append(scores)
            request.num_scored += len(scores)
        if row.samples or request_id in result.vouched:
            # the finite numbers of its last token vouch for all tokens before it
            request.num_finite = request.num_computed
            if request.num_finite >= (request.num_published + 1) * self._pool.block_size:
                self.prefixes.publish(request)
        if is_late:
            self.guided.note_late(request)
        elif row.samples:
            return self._append_token(request, result, now)
        return None if request.num_uncomputed else self._finish(request, "length")

    def _append_token(self, request: Request, result: StepResult, now: float) -> TokenEvent:
        if request.last_token_at is None:
            request.first_token_at = now
            self.prefixes.publish_tail(request)
        else:
            self._token_gaps.append(now - request.last_token_at)
        request.last_token_at = now
        token_id = result.sampled[request.request_id]
        request.output_ids.append(token_id)
        self.num_sampled += 1
        self._share.note_sampled(request)
        reason, is_hidden = find_ending(request, token_id, self._eos_token_ids, self._limits.max_model_len)
        token_ids = [] if is_hidden else [token_id]
        logprobs = result.logprobs.get(request.request_id) if result.logprobs else None
        told = [] if is_hidden or logprobs is None else [logprobs]
        if reason is not None:
            return self._finish(request, reason, token_ids, told)
        if request.guide is not None:
            self.guided.advance(request)
        scores = _take_scores(request) if request.prompt_logprobs else NO_SCORES
        return TokenEvent(request.request_id, token_ids, logprobs=told, prompt_logprobs=scores)

    def _finish(
        self, request: Request, reason: str, token_ids: Sequence[int] = (), logprobs: Sequence[TokenLogprobs] = ()
    ) -> TokenEvent:
        if request in self.running:
            self.prefixes.publish_tail(request)
            self.prefixes.note_answer(request)
        self._remove(request)
        stats = request.stats(self._clock())
        return TokenEvent(
            request.request_id,
            list(token_ids),
            reason,
            stats=stats,
            logprobs=list(logprobs),
            prompt_logprobs=_take_scores(request),
        )

    def _fail(self, request: Request, error: RequestError) -> TokenEvent:
        self._remove(request)
        info = ErrorInfo(error.code, str(error), error.retry_after_s)
        return TokenEvent(request.request_id, [], "error", info, request.stats(self._clock()))

    def _remove(self, request: Request) -> None:
        del self._id_to_request[request.request_id]
        self.guided.forget(request)
        if request in self.running:
            del self.running[request]
        else:
            self.waiting.remove(request)
        self._release(request)
        if request.digest is not None:
            self.turns.note_ended(request)
            self._residency.let_go(request.digest)

    def _release(self, request: Request) -> None:
        self.prefixes.leave(request)
        self._pool.free(request.block_ids)
        request.block_ids = []
        if request.slot != NO_SLOT:
            self._residency.unpin(request.slot)
            request.slot = NO_SLOT

    def _free_copied(self) -> None:
        """Let go of blocks that were held until the step had copied them."""
        self._pool.free([source for source, _ in self._draft.block_copies])
        self._draft.block_copies = []


def _take_scores(request: Request) -> PromptScores:
    """The log-probabilities of a request's prompt, once, when all of them are known."""
    if request.params.prompt_logprobs is None or request.is_scoring:
        return NO_SCORES
    parts, request.prompt_logprobs = request.prompt_logprobs, []
    return join_scores(parts)
