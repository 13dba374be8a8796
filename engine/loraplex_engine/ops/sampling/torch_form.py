"""The sampling ops in torch, for any device: all rows at once, and no sort of the vocabulary unless a row needs one.

A row that filters by rank looks at its likeliest tokens first, which nearly always hold what it keeps. Scores and ids
are packed into one integer, so that equal scores, of which bfloat16 has many, come in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_engine.ops.sampling.naive import count_top, edit
from loraplex_engine.ops.sampling.row import Chosen, SamplingRow, Scored

_WIDTH = 1024
"""Candidates looked at first, then `_GROWTH` times as many for rows that need more."""
_GROWTH = 8


def choose_tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> Chosen:
    """See `choose.choose_tokens`."""
    raw = logits.float()
    scores = _edit(raw, rows)
    is_valid = torch.isfinite(raw.amax(dim=-1)) & torch.isfinite(scores.amax(dim=-1))
    token_ids = scores.argmax(dim=-1)
    for indices in _drawn(rows):
        # a row without a token must not send the others after its NaNs
        candidates = torch.where(is_valid[indices, None], scores[indices], 0.0)
        token_ids[indices] = _draw(candidates, [rows[index] for index in indices])
    return Chosen(torch.where(is_valid, token_ids, -1), *_tell(raw, token_ids, count_top(rows, raw.shape[1])))


def score_tokens(logits: Tensor, token_ids: Tensor, num_top: int) -> Scored:
    """See `score.score_tokens`."""
    raw = logits.float()
    logprobs, top_ids = _tell(raw, token_ids, min(num_top, raw.shape[1]))
    is_valid = torch.isfinite(raw.amax(dim=-1, keepdim=True))
    return Scored(torch.where(is_valid, logprobs, torch.nan), top_ids)


def _edit(raw: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    edited = [i for i, row in enumerate(rows) if len(row.edit_ids) or len(row.seen_ids) or len(row.allowed)]
    if not edited:
        return raw
    return raw.index_copy(0, _index(edited, raw), torch.stack([edit(raw[i], rows[i]) for i in edited]))


def _drawn(rows: Sequence[SamplingRow]) -> list[list[int]]:
    """Indices of the rows that draw in order of id, and of those that draw in order of score."""
    drawn = [i for i, row in enumerate(rows) if row.temperature > 0]
    parts = [[i for i in drawn if rows[i].is_ordered is is_ordered] for is_ordered in (False, True)]
    return [part for part in parts if part]


def _draw(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Tokens [n] of rows [n, V] that all draw in the same order."""
    temperature, min_p, number = (
        _column(values, scores)
        for values in ([r.temperature for r in rows], [r.min_p for r in rows], [r.number for r in rows])
    )
    best = scores.amax(dim=-1, keepdim=True)
    mass = torch.exp((scores - best) / temperature.float())
    mass = torch.where(scores.double() < best.double() + temperature * torch.log(min_p), 0.0, mass)
    if not rows[0].is_ordered:
        return _invert(mass.double(), number)
    top_k = _column([r.top_k or scores.shape[1] for r in rows], scores)
    top_p = _column([r.top_p if r.top_p < 1 else torch.inf for r in rows], scores)
    return _draw_ordered(_pack(scores), mass, torch.cat((top_k, top_p, number), dim=-1), _WIDTH)


def _draw_ordered(keys: Tensor, mass: Tensor, settings: Tensor, width: int) -> Tensor:
    """Tokens [n] among the first `width`, or among more where those are too few.

    Args:
        keys: scores and ids by `_pack`, [n, V].
        mass: of each token, float32 [n, V].
        settings: `top_k`, `top_p` and number of each row, float64 [n, 3].
        width: candidates to look at.
    """
    top_k, top_p, number = settings[:, :1], settings[:, 1:2], settings[:, 2:]
    width = min(width, keys.shape[1])
    order = keys.topk(width, dim=-1).indices
    kept = mass.gather(1, order).double()
    kept = torch.where(torch.arange(width, device=keys.device) < top_k, kept, 0.0)
    total = torch.where(top_k <= width, kept.sum(-1, keepdim=True), mass.sum(-1, keepdim=True, dtype=torch.float64))
    limit = top_p * total
    is_open = (top_k > width) & ((top_k < keys.shape[1]) | (kept.sum(-1, keepdim=True) < limit))
    before = kept.cumsum(dim=-1) - kept
    kept[:, 1:] = torch.where(before[:, 1:] < limit, kept[:, 1:], 0.0)
    token_ids = order.gather(1, _invert(kept, number)[:, None])[:, 0]
    rest = torch.nonzero(is_open[:, 0])[:, 0]
    if width < keys.shape[1] and len(rest):
        token_ids[rest] = _draw_ordered(keys[rest], mass[rest], settings[rest], width * _GROWTH)
    return token_ids


def _invert(mass: Tensor, number: Tensor) -> Tensor:
    """Index [n] where `number` of each row's mass is passed; never one without mass."""
    cumulative = mass.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, number * cumulative[:, -1:], right=True)[:, 0]
    last = torch.where(mass > 0, torch.arange(mass.shape[1], device=mass.device), 0).amax(dim=-1)
    return torch.minimum(index, last)


def _tell(raw: Tensor, token_ids: Tensor, num_top: int | None) -> tuple[Tensor, Tensor]:
    """`logprobs` and `top_ids` of `Chosen`."""
    if num_top is None:
        return raw[:, :0], token_ids[:, None][:, :0]
    top_ids = _pack(raw).topk(num_top, dim=-1).indices
    wanted = torch.cat((token_ids[:, None], top_ids), dim=-1)
    return torch.log_softmax(raw, dim=-1).gather(1, wanted), top_ids


def _pack(scores: Tensor) -> Tensor:
    """int64 [n, V] in the order of scores, the lower id higher among equals; no two of a row are equal."""
    # adding 0 makes one zero of the two
    bits = (scores + 0.0).view(torch.int32)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rank.long() << 32) - torch.arange(scores.shape[1], device=scores.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _index(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
