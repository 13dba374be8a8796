"""Finds out who is to blame when a request's logits are not finite: its adapter, the base, or its company in the batch.

`Blame` is the only one that makes requests of its own. It computes the tokens of the failed request again, alone in a
step and from no cached block: once with the adapter and, if that fails too, once on the base. One question at a time;
no client hears of these requests, and no usage counts them. What it finds out is held against the adapter by
`AdapterHealth`.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loraplex_engine.core.request import Request
from loraplex_engine.errors import OutputInvalidError, RequestError, StepFailedError
from loraplex_engine.kv.prefix_index import chain_hash
from loraplex_engine.lora.health import AdapterHealth
from loraplex_engine.scheduling.scheduler import Scheduler
from loraplex_engine.wire.messages import SamplingParams, TokenEvent

CAUSES = ("adapter", "base", "company", "unknown")
_MAX_SUSPECTS = 8
_TIMEOUT_S = 30.0
_REASON = "Requests with different prompts met numbers that are not finite, alone in their step, and not on the base."
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Suspect:
    digest: str
    prompt_ids: list[int]
    output_ids: list[int]
    prompt_hash: bytes
    is_cut: bool
    """The request had more tokens than one step computes, so an answer without a fault says nothing."""


class Blame:
    """Questions about failed requests, asked through the scheduler that serves everybody.

    Args:
        scheduler: computes the questions between the steps of the others; what fits into one step is computed again.
        health: is told of adapters that are to blame.
        clock: seconds, monotonic.
        on_verdict: told each cause, one of `CAUSES`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        health: AdapterHealth,
        clock: Callable[[], float],
        on_verdict: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._scheduler = scheduler
        self._health = health
        self._clock = clock
        self._on_verdict = on_verdict
        self._suspects: deque[_Suspect] = deque()
        self._question: Request | None = None
        self._ids = itertools.count()

    def suspect(self, request: Request) -> None:
        """Ask about a request that failed, soon; one too many at a time is not asked about."""
        if request.digest is None or request.is_lone:
            return
        if len(self._suspects) >= _MAX_SUSPECTS:
            self._on_verdict("unknown")
            return
        prompt_ids = request.prompt_ids[: self._scheduler.max_step_tokens]
        output_ids = request.output_ids[: self._scheduler.max_step_tokens - len(prompt_ids)]
        is_cut = len(prompt_ids) + len(output_ids) < request.num_tokens
        prompt_hash = chain_hash(b"", request.prompt_ids)
        self._suspects.append(_Suspect(request.digest, prompt_ids, output_ids, prompt_hash, is_cut))

    def settle(self, events: Sequence[TokenEvent]) -> list[TokenEvent]:
        """Take the answers to questions out of a step's events, draw conclusions, and ask the next question.

        Returns:
            What clients must be told: the other events, and the ends of requests whose adapter is now quarantined.
        """
        told: list[TokenEvent] = []
        for event in events:
            if self._question is not None and event.request_id == self._question.request_id:
                told += self._conclude(self._question, event)
            else:
                told.append(event)
        if self._question is None and self._suspects:
            self._ask(self._suspects[0].digest)
        return told

    def _ask(self, digest: str | None) -> None:
        suspect = self._suspects[0]
        # NOTE: outputs stay outputs: an adapter that is invoked acts from a place in the prompt
        params = SamplingParams(len(suspect.output_ids) + 1, temperature=0.0, ignore_eos=True)
        request = Request(f"blame:{next(self._ids)}", suspect.prompt_ids, params, digest, is_lone=True)
        request.output_ids = list(suspect.output_ids)
        request.deadline_at = self._clock() + _TIMEOUT_S
        try:
            self._scheduler.add(request)
            self._question = request
        except RequestError:
            self._close("unknown")

    def _conclude(self, question: Request, answer: TokenEvent) -> list[TokenEvent]:
        self._question = None
        code = answer.error.code if answer.error is not None else None
        if question.digest is not None and code == OutputInvalidError.code:
            self._ask(None)
            return []
        if question.digest is not None:
            self._close("company" if code is None and not self._suspects[0].is_cut else "unknown")
            return []
        suspect = self._suspects[0]
        self._close("adapter" if code is None else "base" if code == StepFailedError.code else "unknown")
        return self._strike(suspect) if code is None else []

    def _close(self, cause: str) -> None:
        suspect = self._suspects.popleft()
        _log.warning("the output of %s was not finite; to blame: %s", suspect.digest, cause)
        self._on_verdict(cause)

    def _strike(self, suspect: _Suspect) -> list[TokenEvent]:
        self._health.strike(suspect.digest, suspect.prompt_hash, _REASON)
        error = self._health.find_refusal(suspect.digest)
        if error is None:
            return []
        _log.error("%s is quarantined on this replica", suspect.digest)
        return self._scheduler.fail_waiting(suspect.digest, error)
