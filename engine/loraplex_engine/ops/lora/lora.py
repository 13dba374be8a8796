"""The LoRA ops: `y = g * (y + scaling * (x A^T) B^T) + c` for the rows that use an adapter, each at its own rank.

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

    *Semantics*: `v = x A^T`, accumulated in float32 in an order that depends on K alone. Ranks are 1 to 256, each
    module's own; a module of rank 0 is not computed.

    Args:
        x: input rows of the group, [T, K].
        table: weights of all slots.
        layer: index of the layer.
        group: key of `GROUPS`, but not the embedding, whose `v` is a gather of rows of A (stored [V, r]).
        segments: which rows use which slot.

    Returns:
        [T_lora, slices * max_rank] float32, rows in the order of `segments.token_indices`; slice `i` begins at column
        `i * max_rank`; columns at or past a module's rank hold anything. The Triton form leaves the sum over K in
        parts, [planes, T_lora, slices * max_rank], which its expand adds up in order.

    Raises:
        IndexError: a segment names an empty slot. (A GPU cannot raise: there expand makes such rows NaN.)
    """
    return kernels_for(x).lora_shrink(x, table, layer, group, segments)


def lora_expand(v: Tensor, y: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> None:
    """Add the adapters' contribution to the output of the base linear, in place.

    *Semantics*: `y = g * (y + scaling * v B^T) + c` at each slice's columns, computed in float32, rounded once. `g` and
    `c` are float32 vectors of the (slot, module), which DoRA and trained biases have; an absent `g` is 1, an absent `c`
    is 0. A module of rank 0 is `y = g * y + c`; its columns of `v` are not read. Where a row's slot has no module the
    row keeps its bits, as do rows without a slot. What is not finite in one slot's weights or rows reaches no row of
    another slot. A row's bits depend on the row and its module alone (except in the torch form).

    Args:
        v: result of `lora_shrink`, [T_lora, slices * max_rank] float32; of the embedding the gathered rows of A.
        y: output of the base linear, [T, sum of the slices' features], contiguous; updated in place.
        table: weights of all slots.
        layer: index of the layer.
        group: key of `GROUPS`.
        segments: which rows use which slot.

    Raises:
        IndexError: a segment names an empty slot.
    """
    kernels_for(y).lora_expand(v, y, table, layer, group, segments)


def lora_add(x: Tensor, y: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> None:
    """Shrink and expand in one call, with the same bits as the two calls: what a model uses.

    Args:
        x: input rows of the group, [T, K].
        y: output of the base linear for `x`; updated in place.
        table: weights of all slots.
        layer: index of the layer.
        group: key of `GROUPS`, but not the embedding.
        segments: which rows use which slot.

    Raises:
        IndexError: a segment names an empty slot.
    """
    kernels_for(x).lora_add(x, y, table, layer, group, segments)
