"""Adapter weights of the slots. `DeviceBank` is the only writer of the `LoraTable` and `Replacements` of an engine.

On the CPU an adapter's host mapping already is device memory, so binding is writing table rows; the mapping lives as
long as its slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex_engine.core.module_group import EMBEDDING_GROUP, GROUP_NAMES
from loraplex_engine.lora.packed import PackedAdapter, PackedModule
from loraplex_engine.ops.lora.replacement import Replacements
from loraplex_engine.ops.lora.table import LoraTable


class DeviceBank:
    """Binds packed adapters to slots."""

    def __init__(self, table: LoraTable, replacements: Replacements) -> None:
        self.table = table
        self.replacements = replacements

    def bind(self, slot_id: int, adapter: PackedAdapter) -> None:
        """Make the slot answer with this adapter, replacing what it held."""
        self.clear(slot_id)
        whole = torch.frombuffer(adapter.buffer, dtype=torch.uint8)
        for module in adapter.facts.modules:
            self._bind_module(slot_id, module, whole)
        dtype = self.table.dtype
        for norm in adapter.facts.norms:
            self.replacements.set_norm(slot_id, norm.path, _view(whole, norm.start, dtype, norm.width))
        for rows in adapter.facts.rows:
            token_ids = torch.tensor(rows.token_ids) if rows.token_ids else None
            matrix = _view(whole, rows.start, dtype, rows.num_rows, rows.width)
            self.replacements.set_rows(slot_id, GROUP_NAMES[rows.group], matrix, token_ids)

    def clear(self, slot_id: int) -> None:
        """Make the slot hold nothing."""
        self.table.clear(slot_id)
        self.replacements.clear(slot_id)

    def _bind_module(self, slot_id: int, module: PackedModule, whole: Tensor) -> None:
        group, dtype, rank = GROUP_NAMES[module.group], self.table.dtype, module.rank
        a_shape = (module.in_features, rank) if group == EMBEDDING_GROUP else (rank, module.in_features)
        self.table.set_module(
            slot_id,
            module.layer,
            group,
            module.slice_id,
            _find(whole, module.a_start, dtype, *a_shape),
            _find(whole, module.b_start, dtype, rank, module.out_features),
            module.scaling,
            _find(whole, module.g_start, torch.float32, module.out_features),
            _find(whole, module.c_start, torch.float32, module.out_features),
        )


def _find(whole: Tensor, start: int, dtype: torch.dtype, *shape: int) -> Tensor | None:
    return None if start < 0 else _view(whole, start, dtype, *shape)


def _view(whole: Tensor, start: int, dtype: torch.dtype, *shape: int) -> Tensor:
    num_bytes = dtype.itemsize
    for length in shape:
        num_bytes *= length
    return whole[start : start + num_bytes].view(dtype).view(shape)
