"""Random steps for LoRA kernels, on any device: everything that must not be read or written is NaN.

Matrices, activations and outputs lie inside NaN, empty slots hold NaN, and each case carries a second table in float64
from which the naive form computes the truth.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_engine.core.module_group import EMBEDDING_GROUP, GROUPS
from loraplex_engine.core.request import NO_SLOT
from loraplex_engine.ops.lora import naive
from loraplex_engine.ops.lora.segment import Segments, build_segments
from loraplex_engine.ops.lora.table import GroupShape, LoraTable

# largest error over largest true value; the output is rounded once, v is not rounded at all
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
MIXED = 0
MIXED_RANKS = (4, 17, 1, 64, 8, 256, 16, 128)
MAX_RANK = 256

# widths that are multiples of nothing; down needs two planes, of which the second is shorter
SMALL = {
    "qkv": GroupShape(37, (150, 18, 18)),
    "o": GroupShape(150, (37,)),
    "gate_up": GroupShape(37, (67, 67)),
    "down": GroupShape(1100, (37,)),
    "embedding": GroupShape(331, (37,)),
    "head": GroupShape(37, (331,)),
}
# as real as SmolLM2: every row aligned
SMOLLM2 = {
    "qkv": GroupShape(576, (576, 192, 192)),
    "o": GroupShape(576, (576,)),
    "gate_up": GroupShape(576, (1536, 1536)),
    "down": GroupShape(1536, (576,)),
    "embedding": GroupShape(49152, (576,)),
    "head": GroupShape(576, (49152,)),
}


def pick_slots(popularity: str, num_rows: int) -> list[int]:
    """The slot of each row: `identical`, `uniform`, `skewed` (both with rows of the base) or `distinct`."""
    if popularity == "identical":
        return [1] * num_rows
    if popularity == "distinct":
        return list(range(num_rows))
    if popularity == "uniform":
        return [row % 4 - 1 for row in range(1, num_rows + 1)]
    assert popularity == "skewed"
    return [3, *random.choices([0, 1, 2, 3, NO_SLOT], weights=[27, 9, 3, 1, 4], k=num_rows - 1)]


def inside_nan(tensor: Tensor) -> Tensor:
    """A copy with NaN before and behind it, which begins at a multiple of 64 bytes."""
    margin = 256
    arena = tensor.new_full((tensor.numel() + 2 * margin,), torch.nan)
    copy = arena[margin : margin + tensor.numel()].view(tensor.shape)
    return copy.copy_(tensor)


@dataclass(frozen=True)
class Step:
    """The rows of one step and the two tables that their slots point into."""

    slots: Sequence[int]
    segments: Segments
    table: LoraTable
    truth_table: LoraTable
    group: str

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Random x and y."""
        shape, dtype, device = self.table.shapes[self.group], self.table.dtype, self.table.entries.device
        x = torch.randn(len(self.slots), shape.in_features, device=device).to(dtype)
        return inside_nan(x), inside_nan(torch.randn(len(x), sum(shape.out_features), device=device).to(dtype))

    def truth(self, x: Tensor, y: Tensor) -> Tensor:
        """What y shall become, in float64; computed on the host."""
        wide = y.double().cpu()
        segments = build_segments(self.slots)
        assert segments is not None
        naive.lora_add(x.double().cpu(), wide, self.truth_table, 0, self.group, segments)
        return wide

    def is_adapted(self) -> Tensor:
        """Which entries of y belong to a row and a slice with a module, [T, O]."""
        shape = self.table.shapes[self.group]
        mask = torch.zeros(len(self.slots), sum(shape.out_features), dtype=torch.bool)
        for row, slot in enumerate(self.slots):
            for i, (offset, width) in enumerate(zip(shape.offsets, shape.out_features, strict=True)):
                found = slot != NO_SLOT and self.table.find_module(slot, 0, self.group, i) is not None
                mask[row, offset : offset + width] = found
        return mask


def make_step(
    slots: Sequence[int],
    dtype: torch.dtype,
    rank: int,
    group: str = "qkv",
    shapes: Mapping[str, GroupShape] = SMALL,
    device: str = "cpu",
    max_rank: int = MAX_RANK,
) -> Step:
    """Give every slot that occurs an adapter.

    By slot, modules differ in what they are: some have `g`, some `c`, some are absent, and some are of rank 0.

    Args:
        slots: of each row; one at least is not `NO_SLOT`.
        dtype: of the model.
        rank: of all modules, or `MIXED`.
        group: the one that the step computes.
        shapes: of all groups.
        device: where the step's table and rows lie.
        max_rank: of the table.
    """
    segments = build_segments(slots, device)
    assert segments is not None
    num_slots = max(slots) + 2
    table = LoraTable(num_slots, 1, shapes, max_rank, dtype, device)
    truth_table = LoraTable(num_slots, 1, shapes, max_rank, torch.float64)
    for slot in sorted({slot for slot in slots if slot != NO_SLOT}):
        for i_slice in range(len(GROUPS[group])):
            if slot % 4 == 3 and i_slice == 1:
                continue
            own_rank = rank or MIXED_RANKS[(slot + i_slice) % len(MIXED_RANKS)]
            if slot % 5 == 4 and i_slice == 2:
                own_rank = 0
            _put_module(table, truth_table, slot, group, i_slice, own_rank)
    _poison_empty_slots(table)
    return Step(slots, segments, table, truth_table, group)


def _put_module(table: LoraTable, truth: LoraTable, slot: int, group: str, i_slice: int, rank: int) -> None:
    inputs, outputs = table.shapes[group].in_features, table.shapes[group].out_features[i_slice]
    device = table.entries.device
    a_shape = (inputs, rank) if group == EMBEDDING_GROUP else (rank, inputs)
    a = (torch.randn(a_shape, device=device) / inputs**0.5).to(table.dtype)
    b = torch.randn(rank, outputs, device=device).to(table.dtype)
    # two thirds of the modules are plain; one of rank 0 has one vector at least
    g = torch.randn(outputs, device=device) if slot % 3 == 1 or rank == 0 else None
    c = torch.randn(outputs, device=device) if slot % 3 == 1 and i_slice != 1 else None
    matrices = (a, b) if rank else (None, None)
    scaling = 0.25 + 0.125 * (slot % 7)
    a, b, g, c = (None if t is None else inside_nan(t) for t in (*matrices, g, c))
    table.set_module(slot, 0, group, i_slice, a, b, scaling, g, c)
    a, b, g, c = (None if t is None else t.double().cpu() for t in (a, b, g, c))
    truth.set_module(slot, 0, group, i_slice, a, b, scaling, g, c)


def _poison_empty_slots(table: LoraTable) -> None:
    """A slot that was used and cleared, as a bank leaves it; its old matrices are NaN."""
    slot = table.num_slots - 1
    a = torch.full((3, table.shapes["o"].in_features), torch.nan, dtype=table.dtype, device=table.entries.device)
    b = torch.full((3, table.shapes["o"].out_features[0]), torch.nan, dtype=table.dtype, device=table.entries.device)
    table.set_module(slot, 0, "o", 0, a, b, torch.nan)
    table.clear(slot)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree to the last bit, signs of zeros and NaN included."""
    return torch.equal(one.contiguous().view(BITS[one.dtype]), other.contiguous().view(BITS[other.dtype]))


def assert_true(result: Tensor, before: Tensor, truth: Tensor, step: Step) -> None:
    """Check what became of y: close to the truth where a module is, untouched to the bit elsewhere."""
    is_adapted = step.is_adapted()
    result, before = result.cpu(), before.cpu()
    assert same_bits(result[~is_adapted], before[~is_adapted])
    assert torch.isfinite(result).all()
    error = (result.double() - truth).abs().max() / truth.abs().max()
    assert error.item() <= TOLERANCE[result.dtype]
