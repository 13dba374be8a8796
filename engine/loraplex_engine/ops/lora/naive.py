"""The definition of shrink and expand, one module and one segment at a time, for any float dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex_engine.core.module_group import GROUPS
from loraplex_engine.ops.lora.segment import Segments
from loraplex_engine.ops.lora.table import LoraModule, LoraTable


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def lora_shrink(x: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> Tensor:
    """See `lora.lora_shrink`."""
    v = _wide(x).new_zeros(segments.num_rows, table.width(group))
    begin = 0
    for slot, rows in segments.spans():
        for i_slice in range(len(GROUPS[group])):
            module = table.find_module(slot, layer, group, i_slice)
            if module is not None and module.a is not None:
                column = i_slice * table.max_rank
                product = _wide(x[rows]) @ _wide(module.a).T
                v[begin : begin + len(rows), column : column + module.rank] = product
        begin += len(rows)
    return v


def lora_expand(v: Tensor, y: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> None:
    """See `lora.lora_expand`."""
    begin = 0
    shape = table.shapes[group]
    for slot, rows in segments.spans():
        for i_slice, (offset, width) in enumerate(zip(shape.offsets, shape.out_features, strict=True)):
            module = table.find_module(slot, layer, group, i_slice)
            if module is not None:
                columns = slice(offset, offset + width)
                ranks = v[begin : begin + len(rows), i_slice * table.max_rank :][:, : module.rank]
                y[rows, columns] = _adapt(module, ranks, _wide(y[rows, columns])).to(y.dtype)
        begin += len(rows)


def _adapt(module: LoraModule, v: Tensor, y: Tensor) -> Tensor:
    """What one module makes of the base's output for its rows."""
    if module.b is not None:
        y = y + module.scaling * (v @ _wide(module.b))
    if module.g is not None:
        y = module.g * y
    return y if module.c is None else y + module.c


def lora_add(x: Tensor, y: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> None:
    """See `lora.lora_add`."""
    lora_expand(lora_shrink(x, table, layer, group, segments), y, table, layer, group, segments)
