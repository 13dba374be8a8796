"""The native LoRA ops behind the signatures of `lora.lora`; callable once `native_status` said `native`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loraplex_engine.core.module_group import GROUP_INDEX, GROUPS
from loraplex_engine.ops.lora.segment import Segments
from loraplex_engine.ops.lora.table import LoraTable

OPS: Any = torch.ops.loraplex


def lora_shrink(x: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> Tensor:
    """See `lora.lora_shrink`."""
    result: Tensor = OPS.lora_shrink.default(x, *_arguments(table, layer, group, segments))
    return result


def lora_expand(v: Tensor, y: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> None:
    """See `lora.lora_expand`."""
    OPS.lora_expand.default(v, y, *_arguments(table, layer, group, segments))


def lora_add(x: Tensor, y: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> None:
    """See `lora.lora_add`."""
    OPS.lora_add.default(x, y, *_arguments(table, layer, group, segments))


def _arguments(table: LoraTable, layer: int, group: str, segments: Segments) -> tuple[Tensor | int, ...]:
    return (
        table.entries,
        table.scalings,
        table.occupied,
        table.features,
        layer,
        GROUP_INDEX[group],
        len(GROUPS[group]),
        table.max_rank,
        segments.token_indices,
        segments.starts,
        segments.slots,
    )
