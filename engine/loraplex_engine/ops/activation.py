"""Gated activations of the feed-forward block."""

from __future__ import annotations

from torch import Tensor

from loraplex_engine.ops.dispatch import kernels_for


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Gate the up projection.

    *Semantics*: `round(silu(gate)) * up`, silu in float32 (as transformers does).

    Args:
        gate_up: [T, 2 I], the gate in the first half of the columns.

    Returns:
        A new tensor [T, I].
    """
    return kernels_for(gate_up).silu_and_mul(gate_up)
