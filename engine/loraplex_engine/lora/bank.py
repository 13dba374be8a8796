"""Adapter weights of the slots. `DeviceBank` is the only writer of the `LoraTable` and `Replacements` of an engine.

On the CPU an adapter's host mapping already is device memory, so binding is writing table rows; the mapping lives as
long as its slot.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from loraplex_engine.core.module_group import GROUP_NAMES
from loraplex_engine.lora.packed import PackedAdapter
from loraplex_engine.ops.lora.replacement import Replacements
from loraplex_engine.ops.lora.row import MODULE_ROW
from loraplex_engine.ops.lora.table import LoraTable


class DeviceBank:
    """Binds packed adapters to slots."""

    def __init__(self, table: LoraTable, replacements: Replacements) -> None:
        self.table = table
        self.replacements = replacements

    def bind(self, slot_id: int, adapter: PackedAdapter) -> None:
        """Make the slot answer with this adapter, replacing what it held."""
        self.clear(slot_id)
        facts = adapter.facts
        buffer = torch.frombuffer(adapter.buffer, dtype=torch.uint8).to(self.table.entries.device)
        self.table.set_adapter(slot_id, buffer, np.frombuffer(facts.table, dtype=MODULE_ROW))
        for norm in facts.norms:
            self.replacements.set_norm(slot_id, norm.path, self._view(buffer, norm.start, norm.width))
        for rows in facts.rows:
            token_ids = torch.tensor(rows.token_ids) if rows.token_ids else None
            matrix = self._view(buffer, rows.start, rows.num_rows, rows.width)
            self.replacements.set_rows(slot_id, GROUP_NAMES[rows.group], matrix, token_ids)

    def clear(self, slot_id: int) -> None:
        """Make the slot hold nothing."""
        self.table.clear(slot_id)
        self.replacements.clear(slot_id)

    def _view(self, buffer: Tensor, start: int, *shape: int) -> Tensor:
        dtype = self.table.dtype
        return buffer[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
