"""The Triton form of shrink and expand: one launch each, for every row, slot, rank and slice of a group.

Imported only where Triton is; `ops.dispatch` decides.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from loraplex_engine.core.module_group import GROUP_INDEX, GROUPS, MAX_SLICES
from loraplex_engine.ops.lora import triton_kernels
from loraplex_engine.ops.lora.segment import Segments
from loraplex_engine.ops.lora.table import GroupShape, LoraTable
from loraplex_engine.ops.lora.triton_tiles import EXPAND_TILES, SHRINK_TILES, num_planes
from loraplex_engine.ops.triton.chip import ALIGNMENT_BYTES, HALF_DTYPES, find_chip

ALIGNED_COLUMNS = 16
_NO_BLOCK = 2**31 - 1


def lora_shrink(x: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> Tensor:
    """See `lora.lora_shrink`; the result is left in [planes, T_lora, slices * max_rank], to be added up in order."""
    shape, num_slices = table.shapes[group], len(GROUPS[group])
    _check("x", x, shape.in_features, table)
    tile = SHRINK_TILES[find_chip(x.device), x.dtype in HALF_DTYPES]
    planes = num_planes(shape.in_features)
    v = torch.empty(planes, segments.num_rows, table.width(group), dtype=torch.float32, device=x.device)
    grid = (len(segments.chunks), num_slices * _blocks(table.max_rank, tile.program_ranks), planes)
    triton_kernels._lora_shrink_kernel[grid](
        x,
        v,
        segments.token_indices,
        segments.chunks,
        table.entries,
        table.features,
        *_place(table, layer, group),
        segments.num_rows,
        num_slices,
        table.max_rank,
        **tile.constants(is_aligned=_is_aligned(x, shape)),
        **tile.launch_options,
    )
    return v


def lora_expand(v: Tensor, y: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> None:
    """See `lora.lora_expand`; rows of an empty slot become NaN, since a kernel cannot raise."""
    shape, num_slices = table.shapes[group], len(GROUPS[group])
    _check("y", y, sum(shape.out_features), table)
    planes = v.shape[0] if v.dim() == 3 else 1
    assert v.shape[-2:] == (segments.num_rows, table.width(group)), f"v has shape {tuple(v.shape)}"
    assert v.dtype is torch.float32, f"v is {v.dtype}"
    assert v.is_contiguous(), "v must be contiguous"
    tile = EXPAND_TILES[find_chip(y.device), y.dtype in HALF_DTYPES]
    first_blocks = [0]
    for width in shape.out_features:
        first_blocks.append(first_blocks[-1] + _blocks(width, tile.block_o))
    second, third = (*first_blocks[1:-1], _NO_BLOCK, _NO_BLOCK)[:2]
    triton_kernels._lora_expand_kernel[len(segments.chunks), first_blocks[-1]](
        v,
        y,
        segments.token_indices,
        segments.chunks,
        table.entries,
        table.scalings,
        table.occupied,
        table.features,
        *_place(table, layer, group),
        segments.num_rows,
        num_slices,
        table.max_rank,
        y.shape[1],
        second,
        third,
        **tile.constants(planes=planes, is_aligned=_is_aligned(y, shape)),
        **tile.launch_options,
    )


def lora_add(x: Tensor, y: Tensor, table: LoraTable, layer: int, group: str, segments: Segments) -> None:
    """See `lora.lora_add`."""
    lora_expand(lora_shrink(x, table, layer, group, segments), y, table, layer, group, segments)


def _place(table: LoraTable, layer: int, group: str) -> tuple[int, int, int]:
    """Entries of one slot; place of (layer, group) among them; place of the group among the rows of `features`."""
    num_layers = table.entries.shape[1]
    assert 0 <= layer < num_layers, f"no such place: layer {layer}"
    feature_place = GROUP_INDEX[group] * MAX_SLICES
    slices_of_layer = len(GROUPS) * MAX_SLICES
    return num_layers * slices_of_layer, layer * slices_of_layer + feature_place, feature_place


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


def _is_aligned(activations: Tensor, shape: GroupShape) -> bool:
    """Whether every row of every matrix begins at a multiple of 16 bytes, so that 16 may be read at once."""
    return activations.data_ptr() % ALIGNMENT_BYTES == 0 and _has_aligned_rows(shape)


@functools.cache
def _has_aligned_rows(shape: GroupShape) -> bool:
    return all(width % ALIGNED_COLUMNS == 0 for width in (shape.in_features, *shape.out_features))


def _check(name: str, activations: Tensor, columns: int, table: LoraTable) -> None:
    assert activations.shape[1] == columns, f"{name} has {activations.shape[1]} columns, not {columns}"
    assert activations.dtype is table.dtype, f"{name} is {activations.dtype}, the table {table.dtype}"
    assert activations.is_contiguous(), f"{name} must be contiguous"
