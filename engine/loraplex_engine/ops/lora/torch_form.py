"""Shrink and expand without a compiler: dense products over the ranks of all active slots, masked row by row.

*Semantics* as in `naive`, with products in the model's dtype. Every row is multiplied by every active slot's matrices,
side by side, and only what belongs to its own slot is kept. Correct within tolerance, but not row-invariant to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex_engine.core.module_group import GROUPS
from loraplex_engine.ops.lora import naive
from loraplex_engine.ops.lora.segment import Segments
from loraplex_engine.ops.lora.table import LoraModule, LoraTable


def lora_shrink(x: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> Tensor:
    """See `lora.lora_shrink`."""
    rows = x[segments.token_indices.long()]
    v = x.new_zeros(segments.num_rows, table.width(group), dtype=torch.float32)
    for i_slice in range(len(GROUPS[group])):
        modules = _active_modules(table, layer, group, i_slice, segments)
        if modules:
            _shrink_slice(rows, modules, v[:, i_slice * table.max_rank :][:, : table.max_rank])
    return v


def lora_expand(v: Tensor, y: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> None:
    """See `lora.lora_expand`."""
    before = y.clone()
    _expand(v, y, table, layer, group, segments)
    if not torch.isfinite(y).all():
        # zero times another slot's infinity is NaN: what is not finite stays with its own rows only slot by slot
        y.copy_(before)
        naive.lora_expand(v, y, table, layer, group, segments)


def _expand(v: Tensor, y: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> None:
    rows = segments.token_indices.long()
    shape = table.shapes[group]
    for i_slice, (offset, width) in enumerate(zip(shape.offsets, shape.out_features, strict=True)):
        modules = _active_modules(table, layer, group, i_slice, segments)
        if modules:
            ranks = v[:, i_slice * table.max_rank :][:, : table.max_rank]
            columns = slice(offset, offset + width)
            y[rows, columns] = _expand_slice(ranks, modules, y[rows, columns])


def lora_add(x: Tensor, y: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> None:
    """See `lora.lora_add`."""
    lora_expand(lora_shrink(x, table, layer, group, segments), y, table, layer, group, segments)


Span = tuple[LoraModule, int, int]


def _active_modules(table: LoraTable, layer: int, group: str, i_slice: int, segments: Segments) -> list[Span]:
    """Module and rows [begin, end) of every segment whose slot targets this slice."""
    starts = segments.starts.tolist()
    found = (table.find_module(slot, layer, group, i_slice) for slot in segments.slots.tolist())
    return [(module, starts[i], starts[i + 1]) for i, module in enumerate(found) if module is not None]


def _shrink_slice(rows: Tensor, modules: list[Span], v: Tensor) -> None:
    """One product over all ranks side by side, of which each row keeps its own module's columns."""
    matrices = [module.a for module, _, _ in modules if module.a is not None]
    if not matrices:
        return
    product = (rows @ torch.cat(matrices).T).float()
    column = 0
    for module, begin, end in modules:
        v[begin:end, : module.rank] = product[begin:end, column : column + module.rank]
        column += module.rank


def _expand_slice(ranks: Tensor, modules: list[Span], y: Tensor) -> Tensor:
    """Add one product for all modules, then each module's own vectors to its own rows."""
    wide = y.float() + _multiply_own(ranks, modules, y)
    own = torch.zeros(len(y), 1, dtype=torch.bool, device=y.device)
    for module, begin, end in modules:
        own[begin:end] = True
        if module.g is not None:
            wide[begin:end] *= module.g
        if module.c is not None:
            wide[begin:end] += module.c
    return torch.where(own, wide.to(y.dtype), y)


def _multiply_own(ranks: Tensor, modules: list[Span], y: Tensor) -> Tensor:
    """Place each row's ranks where its own module stands, zeros elsewhere, and multiply once: like `y`, in float32."""
    matrices = [module.b for module, _, _ in modules if module.b is not None]
    placed = y.new_zeros(len(y), sum(len(b) for b in matrices))
    column = 0
    for module, begin, end in modules:
        placed[begin:end, column : column + module.rank] = module.scaling * ranks[begin:end, : module.rank]
        column += module.rank
    return (placed @ torch.cat(matrices)).float() if matrices else torch.zeros_like(y, dtype=torch.float32)
