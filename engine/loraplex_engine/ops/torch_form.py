"""Attention and the plain linear in torch, without a compiler: one request at a time, all its rows at once.

The norms, the activation and the rotary embedding of the naive form are as good as torch gets; only what loops or
widens a whole matrix there has a form of its own here. Correct within tolerance, but not row-invariant to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `linear.plain_linear`."""
    return functional.linear(x, weight)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """See `attention.paged_attention`."""
    out = torch.empty_like(q)
    starts = query_start.tolist()
    for i, length in enumerate(context_len.tolist()):
        rows = slice(starts[i], starts[i + 1])
        if rows.start == rows.stop:
            continue
        k, v = (_gather(cache, block_tables[i], length) for cache in (k_cache, v_cache))
        out[rows] = _attend(q[rows], k, v, scale, window)
    return out


def _gather(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """Keys or values of one request, [G, length, D]."""
    num_blocks = -(-length // cache.shape[1])
    return cache[block_table[:num_blocks].long()].flatten(0, 1)[:length].transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """The last rows of one request, q [n, H * D] over k, v [G, length, D]."""
    num_rows, length = q.shape[0], k.shape[1]
    heads = q.view(num_rows, -1, k.shape[-1]).transpose(0, 1)
    position = torch.arange(length - num_rows, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)
    visible = key <= position
    if window is not None:
        visible &= key > position - window
    mixed = functional.scaled_dot_product_attention(
        heads[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=True
    )
    return mixed[0].transpose(0, 1).flatten(1)
