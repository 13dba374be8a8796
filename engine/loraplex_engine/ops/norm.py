"""RMS normalisation, alone, fused with the residual add, and per attention head."""

from __future__ import annotations

from torch import Tensor

from loraplex_engine.ops.dispatch import kernels_for


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row by its root mean square.

    *Semantics*: `y = round(x / sqrt(mean(x^2) + eps)) * weight`, the mean in float32, rounded to the dtype of `x`
    before the weight is applied (as transformers does). Bits are the same whether rows share a gain or have equal ones.

    Args:
        x: rows, [T, E].
        weight: gain, [E], or one for each row, [T, E].
        eps: added to the mean square.

    Returns:
        A new tensor [T, E].
    """
    return kernels_for(x).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to the residual stream and normalise the sum.

    *Semantics*: `residual += x` (in place, rounded to its dtype); `return rms_norm(residual, weight, eps)`.

    Args:
        x: output of the block before, [T, E]; not changed.
        residual: residual stream, [T, E]; updated in place.
        weight: gain, [E], or one for each row, [T, E].
        eps: added to the mean square.

    Returns:
        A new tensor [T, E].
    """
    return kernels_for(x).add_rms_norm(x, residual, weight, eps)


def head_rms_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, num_heads: int, num_kv_heads: int
) -> None:
    """Normalise every query and key head in place (Qwen3); values are left alone.

    Args:
        qkv: [T, (H + 2 G) * D]: queries, keys, values; queries and keys are updated in place.
        q_weight: gain of the query heads, [D], or one for each row, [T, D].
        k_weight: gain of the key heads, [D] or [T, D].
        eps: added to the mean square.
        num_heads: H.
        num_kv_heads: G.
    """
    kernels_for(qkv).head_rms_norm(qkv, q_weight, k_weight, eps, num_heads, num_kv_heads)
