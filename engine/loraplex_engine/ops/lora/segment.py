"""Which rows of a step use which slot, as sorted runs: the shape in which LoRA kernels want to know it.

Built once per step on the host; the same segments serve every layer. `SegmentBuffers` keeps them at fixed addresses,
where a captured CUDA graph finds them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraplex_engine.core.request import NO_SLOT

CHUNK_ROWS = 16
"""Rows that one program of a GPU kernel takes at most, so that a long prefill is as many programs as it has chunks."""

Lines = list[int] | list[tuple[int, int, int]]


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
    chunks: Tensor
    """[C, 3] int32, the segments in pieces of `CHUNK_ROWS`: slot, first position in `token_indices`, number of rows."""

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
    fields = _group_rows(slot_of_row)
    if fields is None:
        return None
    return Segments(*(torch.from_numpy(np.array(field, dtype=np.int32)).to(device) for field in fields))


class SegmentBuffers:
    """The segments of one step after another, at addresses that stay: only the last `fill` is valid."""

    def __init__(self, max_rows: int, num_slots: int, device: torch.device | str) -> None:
        """Reserve the memory.

        Args:
            max_rows: the most rows of a step.
            num_slots: N.
            device: where the kernels run.
        """
        self._num_slots = num_slots
        num_segments = min(num_slots, max_rows)
        shapes = ((max_rows,), (num_segments + 1,), (num_segments,), (max_chunks(max_rows, num_slots), 3))
        size = sum(math.prod(shape) for shape in shapes)
        # one tensor, so that a step is one copy
        self._host = torch.zeros(size, dtype=torch.int32)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._host_parts = [part.numpy() for part in _cut_up(self._host, shapes)]
        self._parts = _cut_up(self._device, shapes)

    def fill(self, slot_of_row: Sequence[int], bucket: int | None = None) -> Segments | None:
        """Group the rows of a step by slot; overwrites what `fill` returned before.

        Args:
            slot_of_row: slot of each row, `NO_SLOT` for base rows, [T], T at most `max_rows`.
            bucket: T or more. The shapes of `token_indices` and `chunks` are then those of the worst step of so many
                rows, which one graph serves: chunks past the last have no rows, and kernels skip them.

        Returns:
            The segments, or None when no row has an adapter (the step skips LoRA).
        """
        fields = _group_rows(slot_of_row)
        if fields is None:
            return None
        for part, field in zip(self._host_parts, fields, strict=True):
            part[: len(field)] = field
        token_indices, starts, slots, chunks = fields
        num_rows, num_chunks = len(token_indices), len(chunks)
        if bucket is not None:
            assert len(slot_of_row) <= bucket, "a bucket holds the whole step"
            num_rows, num_chunks = bucket, max_chunks(bucket, self._num_slots)
        self._host_parts[-1][len(chunks) :] = 0
        self._device.copy_(self._host)
        lengths = (num_rows, len(starts), len(slots), num_chunks)
        return Segments(*(part[:length] for part, length in zip(self._parts, lengths, strict=True)))


def max_chunks(num_rows: int, num_slots: int) -> int:
    """The most chunks into which a step of so many rows can fall."""
    num_segments = min(num_rows, num_slots)
    return num_segments + (num_rows - num_segments) // CHUNK_ROWS


def _cut_up(memory: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of these shapes, one behind the other."""
    parts = torch.split(memory, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _group_rows(slot_of_row: Sequence[int]) -> tuple[Lines, Lines, Lines, Lines] | None:
    """The fields of `Segments`, on the host. Plain Python: a decode step has few rows."""
    slot_to_rows: dict[int, list[int]] = {}
    for row, slot in enumerate(slot_of_row):
        if slot != NO_SLOT:
            slot_to_rows.setdefault(slot, []).append(row)
    if not slot_to_rows:
        return None
    slots = sorted(slot_to_rows)
    assert slots[0] >= 0, f"{slots[0]} is no slot"
    rows = [row for slot in slots for row in slot_to_rows[slot]]
    starts = [0, *itertools.accumulate(len(slot_to_rows[slot]) for slot in slots)]
    chunks = [
        (slot, begin, min(CHUNK_ROWS, stop - begin))
        for slot, start, stop in zip(slots, starts, starts[1:], strict=False)
        for begin in range(start, stop, CHUNK_ROWS)
    ]
    return rows, starts, slots, chunks
