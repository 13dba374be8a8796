"""The native ops behind `choose.choose_tokens` and `score.score_tokens`, for when `native_status` said `native`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loraplex_engine.ops.sampling.row import Chosen, SamplingRow, Scored

OPS: Any = torch.ops.loraplex


def choose_tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> Chosen:
    """See `choose.choose_tokens`."""
    settings: list[float] = []
    for row in rows:
        settings += (
            row.temperature,
            row.top_k,
            row.top_p,
            row.min_p,
            row.presence_penalty,
            row.frequency_penalty,
            row.repetition_penalty,
            row.number,
            -1 if row.num_top is None else row.num_top,
        )
    edits: tuple[list[Tensor], list[Tensor]] = ([], [])
    if any(len(row.edit_ids) for row in rows):
        edits = [row.edit_ids for row in rows], [row.edit_values for row in rows]
    seen: tuple[list[Tensor], list[Tensor]] = ([], [])
    if any(len(row.seen_ids) for row in rows):
        seen = [row.seen_ids for row in rows], [row.seen_counts for row in rows]
    allowed: list[Tensor] = []
    if any(len(row.allowed) for row in rows):
        allowed = [row.allowed for row in rows]
    return Chosen(*OPS.choose_tokens.default(logits, settings, *edits, *seen, allowed))


def score_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> Scored:
    """See `score.score_tokens`."""
    return Scored(*OPS.score_tokens.default(logits, token_ids, num_top))
