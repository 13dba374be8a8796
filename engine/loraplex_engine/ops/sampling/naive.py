"""The definition of the sampling ops: one row at a time, everything sorted, sums in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_engine.ops.sampling.row import Chosen, SamplingRow, Scored


def choose_greedy(logits: Tensor) -> Tensor:
    """See `choose.choose_greedy`."""
    return torch.where(torch.isfinite(logits.amax(dim=-1)), logits.argmax(dim=-1), -1)


def choose_tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> Chosen:
    """See `choose.choose_tokens`."""
    token_ids = torch.tensor(
        [_choose(scores, row) for scores, row in zip(logits, rows, strict=True)], dtype=torch.int64
    )
    num_top = count_top(rows, logits.shape[1])
    if num_top is None:
        return Chosen(token_ids, torch.empty(len(rows), 0), torch.empty(len(rows), 0, dtype=torch.int64))
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    top_ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :num_top]
    wanted = torch.cat((token_ids.clamp(min=0)[:, None], top_ids), dim=-1)
    return Chosen(token_ids, logprobs.gather(1, wanted).float(), top_ids)


def score_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> Scored:
    """See `score.score_tokens`."""
    top_ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :num_top]
    wanted = torch.cat((token_ids[:, None], top_ids), dim=-1)
    logprobs = torch.log_softmax(logits.double(), dim=-1).gather(1, wanted).float()
    is_valid = torch.isfinite(logits.amax(dim=-1, keepdim=True))
    return Scored(torch.where(is_valid, logprobs, torch.nan), top_ids)


def count_top(rows: Sequence[SamplingRow], vocab_size: int) -> int | None:
    """N of `Chosen`; None where no row wants log-probabilities."""
    wanted = [row.num_top for row in rows if row.num_top is not None]
    return min(max(wanted), vocab_size) if wanted else None


def edit(logits: Tensor, row: SamplingRow) -> Tensor:
    """One row's scores [V] after its edits and penalties, minus infinity where it may not go."""
    return _allow(_penalise(logits, row), row.allowed)


def _penalise(logits: Tensor, row: SamplingRow) -> Tensor:
    scores = logits.float() if logits.dtype is not torch.float64 else logits
    scores = scores.index_add(0, row.edit_ids.to(scores.device), row.edit_values.to(scores))
    if len(row.seen_ids) == 0:
        return scores
    ids, counts = row.seen_ids.to(scores.device), row.seen_counts.to(scores)
    seen = scores[ids]
    seen = torch.where(seen > 0, seen / row.repetition_penalty, seen * row.repetition_penalty)
    seen = seen - row.frequency_penalty * counts
    return scores.index_copy(0, ids, seen - row.presence_penalty * (counts > 0))


def _allow(scores: Tensor, words: Tensor) -> Tensor:
    if len(words) == 0:
        return scores
    bits = (words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    is_allowed = bits.flatten()[: len(scores)].bool().to(scores.device)
    return torch.where(is_allowed, scores, -math.inf)


def _choose(logits: Tensor, row: SamplingRow) -> int:
    scores = edit(logits, row)
    best = scores.max().double()
    if not (torch.isfinite(logits.max()) and torch.isfinite(best)):
        return -1
    if row.temperature == 0:
        return int(scores.argmax())
    mass = torch.exp((scores.double() - best) / row.temperature)
    if row.min_p > 0:
        mass[scores.double() < best + row.temperature * math.log(row.min_p)] = 0
    order = torch.arange(len(mass))
    if row.is_ordered:
        order = torch.sort(scores, descending=True, stable=True).indices
    kept = mass[order]
    if row.top_k > 0:
        kept[row.top_k :] = 0
    if row.top_p < 1:
        before = kept.cumsum(0) - kept
        kept[1:][before[1:] >= row.top_p * kept.sum()] = 0
    cumulative = kept.cumsum(0)
    index = int(torch.searchsorted(cumulative, row.number * cumulative[-1], right=True))
    return int(order[min(index, int(torch.nonzero(kept)[-1]))])
