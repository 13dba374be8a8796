"""Adapter weights of the slots. `DeviceBank` is the only writer of the `LoraTable` that the kernels read.

On the CPU an adapter's host mapping already is device memory, so binding is writing table rows; the mapping lives as
long as its slot.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from loraplex_engine.core.module_group import GROUP_NAMES
from loraplex_engine.lora.packed import PackedAdapter, PackedModule
from loraplex_engine.ops.lora.replacement import Replacements
from loraplex_engine.ops.lora.table import LoraTable


class DeviceBank:
    """Binds packed adapters to slots of one table."""

    def __init__(self, table: LoraTable, replacements: Replacements) -> None:
        self.table = table
        self.replacements = replacements

    def bind(self, slot_id: int, adapter: PackedAdapter) -> None:
        """Make the slot answer with this adapter, replacing what it held."""
        self.clear(slot_id)
        for module, a, b in self._matrices(adapter):
            self.table.set_module(
                slot_id, module.layer, GROUP_NAMES[module.group], module.slice_id, a, b, module.scaling
            )

    def clear(self, slot_id: int) -> None:
        """Make the slot hold nothing."""
        self.table.clear(slot_id)
        self.replacements.clear(slot_id)

    def _matrices(self, adapter: PackedAdapter) -> Iterator[tuple[PackedModule, Tensor, Tensor]]:
        dtype = self.table.dtype
        whole = torch.frombuffer(adapter.buffer, dtype=dtype)
        for module in adapter.facts.modules:
            a_start, b_start = module.a_start // dtype.itemsize, module.b_start // dtype.itemsize
            a = whole[a_start : a_start + module.rank * module.in_features]
            b = whole[b_start : b_start + module.rank * module.out_features]
            yield module, a.view(module.rank, module.in_features), b.view(module.rank, module.out_features)
