"""The LoRA ops: `y += scaling * (x A^T) B^T` for the rows that use an adapter, exact in each adapter's own rank.

Two launches per group of linears on an accelerator (`lora_shrink`, `lora_expand`); `lora_add` is both, and one launch
on the CPU. The form follows the segments of Punica (Chen et al., 2023).
"""

from __future__ import annotations

from torch import Tensor

from loraplex_engine.ops.dispatch import kernels_for
from loraplex_engine.ops.lora.segment import Segments
from loraplex_engine.ops.lora.table import LoraTable


def lora_shrink(x: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> Tensor:
    """Project rows down to the rank of their adapter.

    *Semantics*: `v = x A^T`, accumulated in float32 in an order that depends on K alone.

    Args:
        x: input rows of the group, [T, K].
        table: weights of all slots.
        layer: index of the layer.
        group: key of `GROUPS`.
        segments: which rows use which slot.

    Returns:
        [T_lora, slices * max_rank] float32, rows in the order of `segments.token_indices`; slice `i` begins at column
        `i * max_rank`; columns at or past a module's rank hold anything.
    """
    return kernels_for(x).lora_shrink(x, table, layer, group, segments)


def lora_expand(v: Tensor, y: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> None:
    """Add the adapters' contribution to the output of the base linear, in place.

    *Semantics*: `y = y + scaling * (v B^T)` at each slice's columns, summed in float32, rounded once. The full form is
    `y = g * (y + scaling * v B^T) + c` with float32 vectors `g` and `c` per (slot, module), applied also at rank 0;
    adapters that need them (DoRA, biases) are refused at upload for now, so both are absent here.

    Args:
        v: result of `lora_shrink`.
        y: output of the base linear, [T, sum of the slices' features], contiguous; updated in place.
        table: weights of all slots.
        layer: index of the layer.
        group: key of `GROUPS`.
        segments: which rows use which slot.
    """
    kernels_for(y).lora_expand(v, y, table, layer, group, segments)


def lora_add(x: Tensor, y: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> None:
    """Shrink and expand in one call, with the same bits as the two calls: what a model uses.

    Args:
        x: input rows of the group, [T, K].
        y: output of the base linear for `x`; updated in place.
        table: weights of all slots.
        layer: index of the layer.
        group: key of `GROUPS`.
        segments: which rows use which slot.
    """
    kernels_for(x).lora_add(x, y, table, layer, group, segments)
