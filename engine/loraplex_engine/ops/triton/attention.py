"""The Triton form of paged attention: one launch for every row, request and head of a step.

Its grid follows from the shapes of its arguments alone and nothing is read back, so a captured graph serves every step
of those shapes: a request without rows, and rows past the last `query_start`, cost nothing. Imported only where Triton
is; `ops.dispatch` decides. Head dims above 256, or not multiples of 8, take the torch form.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loraplex_engine.ops import torch_form
from loraplex_engine.ops.triton import attention_kernel
from loraplex_engine.ops.triton.attention_tiles import ATTENTION_TILES, find_padded_dim
from loraplex_engine.ops.triton.chip import ALIGNMENT_BYTES, HALF_DTYPES, find_chip

_NO_WINDOW = 2**31 - 1


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
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    padded_dim = find_padded_dim(head_dim)
    if padded_dim is None:
        return torch_form.paged_attention(q, k_cache, v_cache, block_tables, query_start, context_len, scale, window)
    num_rows, width = q.shape
    num_requests, group = len(context_len), width // (num_kv_heads * head_dim)
    assert k_cache.shape == v_cache.shape, f"v_cache has shape {tuple(v_cache.shape)}"
    assert group * num_kv_heads * head_dim == width, f"q has {width} columns"
    for tensor in (q, k_cache, v_cache):
        assert tensor.is_contiguous(), "queries and caches must be contiguous"
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0, "queries and caches must be aligned"
    for tensor in (block_tables, query_start, context_len):
        assert tensor.is_contiguous(), "lists must be contiguous"
        assert tensor.dtype is torch.int32, f"a list is {tensor.dtype}"
    tile = ATTENTION_TILES[find_chip(q.device), q.dtype in HALF_DTYPES, padded_dim]
    block_heads = min(group, tile.block_m)
    out = torch.empty_like(q)
    grid = (num_rows // (tile.block_m // block_heads) + num_requests, num_kv_heads * -(-group // block_heads))
    attention_kernel._paged_attention_kernel[grid](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        query_start,
        context_len,
        scale * math.log2(math.e),
        _NO_WINDOW if window is None else window,
        num_requests,
        num_kv_heads,
        group,
        head_dim,
        block_tables.shape[1],
        block_size,
        **tile.constants(padded_dim),
        **tile.launch_options,
    )
    return out
