"""Rotary position embedding, fused with the write of keys and values into the paged cache.

The only op that writes the cache. Knows cells, not requests.
"""

from __future__ import annotations

from torch import Tensor

from loraplex_engine.ops.dispatch import kernels_for


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cells: Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """Rotate queries and keys by position and store keys and values.

    *Semantics*: with the halves `a, b` of a head and `cos, sin` of its position, `(a cos - b sin, b cos + a sin)` in
    float32, rounded once; the layout of transformers' `rotate_half`.

    Args:
        qkv: [T, (H + 2 G) * D]: queries, keys, values; not changed.
        positions: position of each row, [T] int64, below `cos_sin.shape[0]`.
        cos_sin: [max_len, D] float32 (float64 in a float64 model): D / 2 cosines, then D / 2 sines.
        k_cache: [B, block_size, G, D] contiguous; the rows' cells are written.
        v_cache: as `k_cache`.
        cells: where each row is stored, `block_id * block_size + offset`, [T] int64, all different.
        num_heads: H.
        num_kv_heads: G.

    Returns:
        The rotated queries, [T, H * D].
    """
    return kernels_for(qkv).rope_and_store(qkv, positions, cos_sin, k_cache, v_cache, cells, num_heads, num_kv_heads)
