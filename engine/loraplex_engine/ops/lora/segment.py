"""Which rows of a step use which slot, as sorted runs: the shape in which LoRA kernels want to know it.

Built once per step on the host; the same segments serve every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_engine.core.request import NO_SLOT


@dataclass(frozen=True)
class Segments:
    """Rows that use an adapter, grouped by slot; base rows are absent.

    Segment `s` covers `token_indices[starts[s] : starts[s + 1]]`, all of which use slot `slots[s]`.
    """

    token_indices: Tensor
    """[T_lora] int32: row ids sorted by slot, ascending within a slot."""
    starts: Tensor
    """[S + 1] int32, first 0, last T_lora."""
    slots: Tensor
    """[S] int32, ascending, all different."""

    @property
    def num_rows(self) -> int:
        """T_lora, the number of rows that use an adapter."""
        return self.token_indices.shape[0]

    def spans(self) -> list[tuple[int, Tensor]]:
        """(slot, int64 row ids) of each segment, for the forms that loop in Python."""
        starts = self.starts.tolist()
        rows = self.token_indices.long()
        return [(slot, rows[starts[i] : starts[i + 1]]) for i, slot in enumerate(self.slots.tolist())]


def build_segments(slot_of_row: Sequence[int], device: torch.device | str = "cpu") -> Segments | None:
    """Group the rows of a step by slot.

    Args:
        slot_of_row: slot of each row, `NO_SLOT` for base rows, [T].
        device: where the tensors shall live.

    Returns:
        The segments, or None when no row has an adapter (the step skips LoRA).
    """
    rows = sorted((row for row, slot in enumerate(slot_of_row) if slot != NO_SLOT), key=lambda row: slot_of_row[row])
    if not rows:
        return None
    starts = [i for i, row in enumerate(rows) if i == 0 or slot_of_row[row] != slot_of_row[rows[i - 1]]]
    slots = [slot_of_row[rows[i]] for i in starts]
    return Segments(
        token_indices=torch.tensor(rows, dtype=torch.int32, device=device),
        starts=torch.tensor([*starts, len(rows)], dtype=torch.int32, device=device),
        slots=torch.tensor(slots, dtype=torch.int32, device=device),
    )
