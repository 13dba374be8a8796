"""A step in the making: its rows, the copies before it, and how much of a prompt still fits."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex_engine.core.request import Request
from loraplex_engine.core.step import NO_POSITIONS, PlannedRow, StepPlan
from loraplex_engine.scheduling.budget import StepBudget
from loraplex_engine.wire.messages import TokenEvent


class StepDraft:
    """What the scheduler has put into the next step so far; at most `max_tokens` tokens."""

    def __init__(self, max_tokens: int, budget: StepBudget) -> None:
        self.num_left = max_tokens
        self.is_short = False
        """Running requests lack blocks: none starts beside them."""
        self.block_copies: list[tuple[int, int]] = []
        self._request_to_row: dict[Request, PlannedRow] = {}
        self._budget = budget

    def add(self, request: Request, num_tokens: int) -> None:
        """Let a request compute its next tokens."""
        start, params = request.num_computed, request.params
        samples = num_tokens == request.num_uncomputed and params.max_tokens > 0 and not request.wants_logits
        scored = NO_POSITIONS if params.prompt_logprobs is None else _find_scored(request, num_tokens)
        self._request_to_row[request] = PlannedRow(request, start, num_tokens, samples, scored)
        self.num_left -= num_tokens

    def give_up(self, request: Request) -> None:
        """Take out a request that gives what it has to another; the time for it is not given to others."""
        self._request_to_row.pop(request, None)

    def open_to_prompts(self, prompts: Sequence[tuple[int, int]]) -> None:
        """From now on only prompts are added, out of these: (first uncomputed position, tokens to compute) of each."""
        stops = [start + num_tokens for _, start, num_tokens, _, _ in self._request_to_row.values()]
        self._budget.begin(stops, prompts)

    def allow(self, start: int, wanted: int) -> int:
        """How many of a prompt's tokens from `start` on the step takes; they count as taken."""
        wanted = min(wanted, self.num_left)
        return self._budget.allow(start, wanted) if wanted > 0 else 0

    def to_plan(self, ended: list[TokenEvent]) -> StepPlan:
        """The step as the runner takes it."""
        return StepPlan(list(self._request_to_row.values()), ended, self.block_copies)

    def observe(self, seconds: float) -> None:
        """Learn from how long the step took."""
        decode_context_lens, chunks = [], []
        for _, start, num_tokens, _, _ in self._request_to_row.values():
            if num_tokens == 1:
                decode_context_lens.append(start + 1)
            else:
                chunks.append((start, num_tokens))
        self._budget.observe(decode_context_lens, chunks, seconds)


def _find_scored(request: Request, num_tokens: int) -> range:
    """Of a request's next tokens those whose logits score its prompt; what is scored already is not scored again."""
    if not request.is_scoring:
        return NO_POSITIONS
    stop = min(request.num_computed + num_tokens, len(request.prompt_ids) - 1)
    return range(max(request.num_computed, request.num_scored), stop)
