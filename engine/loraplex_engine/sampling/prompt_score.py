"""How likely prompts are: the log-probabilities of their own tokens, out of the steps that compute them.

The head is asked for some rows at a time, so a prompt of any length takes the memory of a few rows of logits. A row's
numbers are its own, so neither that nor the chunks of the prompt can change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from loraplex_engine.core.step import PlannedRow, StepPlan
from loraplex_engine.ops.sampling.row import Scored
from loraplex_engine.ops.sampling.score import score_tokens
from loraplex_engine.wire.messages import PromptScores, join_scores

_MAX_SCORES = 1 << 22
"""Logits that are held at once."""
_MIN_ROWS = 8

Logits = Callable[[list[int]], Tensor]
"""The logits, [n, V], of n of the step's tokens."""


def score_prompts(
    plan: StepPlan, compute_logits: Logits, vocab_size: int
) -> tuple[dict[str, PromptScores], frozenset[str]]:
    """Score what the step computes of prompts whose requests ask for it.

    Returns:
        Log-probabilities by request id, and the requests of which a row of logits was not finite.
    """
    told: dict[str, PromptScores] = {}
    invalid: set[str] = set()
    max_rows = max(_MIN_ROWS, _MAX_SCORES // vocab_size)
    for row, first in _find_scored(plan):
        parts: list[PromptScores] = []
        for begin in range(0, len(row.scored), max_rows):
            positions = row.scored[begin : begin + max_rows]
            scored = _score(row, positions, compute_logits([first + position - row.start for position in positions]))
            parts.append(_pack(scored))
            if torch.isnan(scored.logprobs[:, 0]).any():
                invalid.add(row.request.request_id)
        told[row.request.request_id] = join_scores(parts)
    return told, frozenset(invalid)


def _find_scored(plan: StepPlan) -> Iterator[tuple[PlannedRow, int]]:
    """Rows that are scored, with the index of their first token in the step."""
    first = 0
    for row in plan.rows:
        if row.scored:
            yield row, first
        first += row.num_tokens


def _score(row: PlannedRow, positions: range, logits: Tensor) -> Scored:
    """What the logits at some positions say of the tokens after them."""
    token_ids = row.request.prompt_ids[positions.start + 1 : positions.stop + 1]
    num_top = row.request.params.prompt_logprobs
    assert num_top is not None
    return score_tokens(logits, torch.tensor(token_ids, device=logits.device), num_top)


def _pack(scored: Scored) -> PromptScores:
    top_ids = scored.top_ids.to("cpu", torch.int32)
    return PromptScores(top_ids.shape[1], scored.logprobs.cpu().numpy().tobytes(), top_ids.numpy().tobytes())
