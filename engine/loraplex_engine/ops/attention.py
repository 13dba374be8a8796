"""Causal attention over the paged KV cache: one path for prefill, chunk and decode.

Reads the cache, never writes it. A row's sum runs over key tiles anchored at position 0, so its bits depend neither on
the chunk it came in nor on its company.
"""

from __future__ import annotations

from torch import Tensor

from loraplex_engine.ops.dispatch import kernels_for


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend from each row to the positions of its request up to and including its own.

    Row `r` of request `i` stands at position `context_len[i] - (query_start[i + 1] - r)`. Keys and values of this step
    are in the cache already. Nothing at or past `context_len[i]` is read.

    Args:
        q: rotated queries, [T, H * D].
        k_cache: [B, block_size, G, D] contiguous, H a multiple of G.
        v_cache: as `k_cache`.
        block_tables: block ids of each request, [Q, max_blocks] int32; entries past the length may be anything.
        query_start: first row of each request, [Q + 1] int32, not falling; the last entry is T.
        context_len: positions computed including this step, [Q] int32.
        scale: factor on the scores, usually D ** -0.5.
        window: attend to the last `window` positions only, the row's own among them; None: to all.

    Returns:
        A new tensor [T, H * D].
    """
    return kernels_for(q).paged_attention(q, k_cache, v_cache, block_tables, query_start, context_len, scale, window)
