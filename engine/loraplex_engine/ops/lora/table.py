"""Where the kernels find the weights of each slot: pointers, ranks and scalings per (slot, layer, group, slice).

Beside A and B a module may have two float32 vectors, with which expand becomes `y = g * (y + scaling * v B) + c`:
DoRA and trained biases. A module of rank 0 has them alone.

`LoraTable` is written by the bank only (`set_adapter`, `clear`) and read by the LoRA kernels; it keeps the tensors it
points to alive. Persistent for the life of the engine, so a captured graph may hold it. Knows no digests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_engine.core.module_group import EMBEDDING_GROUP, GROUP_INDEX, GROUPS, MAX_SLICES
from loraplex_engine.ops.lora.row import POINTERS


@dataclass(frozen=True)
class GroupShape:
    """Features of one group of linears."""

    in_features: int
    out_features: tuple[int, ...]
    """One entry per slice, in column order."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """First output column of each slice."""
        return tuple(sum(self.out_features[:i]) for i in range(len(self.out_features)))


@dataclass(frozen=True)
class LoraModule:
    """One module of one adapter as the kernels use it."""

    a: Tensor | None
    """[r, K]; of an embedding [K, r], K the vocabulary. None: rank 0, the epilogue alone."""
    b: Tensor | None
    """[r, O]; None where `a` is."""
    scaling: float
    g: Tensor | None = None
    """[O] float32, the epilogue's factor; None: 1."""
    c: Tensor | None = None
    """[O] float32, the epilogue's summand; None: 0."""

    @property
    def rank(self) -> int:
        """R of this module alone."""
        return 0 if self.b is None else self.b.shape[0]


class LoraTable:
    """Weights of every slot, for every layer, group and slice."""

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        shapes: Mapping[str, GroupShape],
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make an empty table.

        Args:
            num_slots: N.
            num_layers: L.
            shapes: features of every group in `GROUPS`.
            max_rank: the largest rank that `set_module` will be given; fixes the width of shrink's result.
            dtype: dtype of all A and B, the model's.
            device: where A and B live.
        """
        assert set(shapes) == set(GROUPS), "a shape for every group"
        self.shapes = dict(shapes)
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.dtype = dtype
        cells = (num_slots, num_layers, len(GROUPS), MAX_SLICES)
        self._host_entries = np.zeros((*cells, 5), dtype=np.int64)
        self._host_scalings = np.full(cells, np.nan, dtype=np.float32)
        self.entries = torch.from_numpy(self._host_entries).to(device)
        """[N, L, groups, slices, 5] int64: address of A, of B, rank, address of g, of c; all 0 where there is none."""
        self.scalings = torch.from_numpy(self._host_scalings).to(device)
        """[N, L, groups, slices] float32; NaN where the slot has no module."""
        self.occupied = torch.zeros(num_slots, dtype=torch.int8, device=device)
        """[N] int8: 1 where the slot holds an adapter. A row that names another slot is an error, never a base row."""
        self._host_features = np.array([self._feature_rows(group) for group in GROUPS], dtype=np.int64)
        self.features = torch.from_numpy(self._host_features).to(device)
        """[groups, slices, 3] int64 per (group, slice): first output column, output columns, input columns."""
        self._poison: tuple[Tensor, Tensor] | None = None
        self._shares_memory = self.entries.device.type == "cpu"
        self._modules: list[dict[tuple[int, str, int], LoraModule]] = [{} for _ in range(num_slots)]
        self._buffers: list[Tensor | None] = [None] * num_slots

    def set_adapter(self, slot: int, buffer: Tensor, rows: NDArray[np.void]) -> None:
        """Point an empty slot at all modules of an adapter at once; the table keeps the buffer alive.

        Args:
            slot: in [0, N).
            buffer: [bytes] uint8 on the table's device; holds every matrix and vector as `set_module` wants them.
            rows: [modules] of `MODULE_ROW`, each place once.
        """
        assert not self._is_taken(slot), "the slot is in use"
        layers, groups, slices = rows["place"].T
        entries = rows["entry"].copy()
        self._check_rows(buffer, groups, slices, entries)
        starts = entries[:, POINTERS]
        entries[:, POINTERS] = np.where(starts < 0, 0, starts + buffer.data_ptr())
        self._host_entries[slot, layers, groups, slices] = entries
        self._host_scalings[slot, layers, groups, slices] = rows["scaling"]
        if not self._shares_memory:
            self.entries[slot] = torch.from_numpy(self._host_entries[slot])
            self.scalings[slot] = torch.from_numpy(self._host_scalings[slot])
        self._buffers[slot] = buffer
        self.occupied[slot] = 1

    def set_module(
        self,
        slot: int,
        layer: int,
        group: str,
        slice_index: int,
        a: Tensor | None,
        b: Tensor | None,
        scaling: float,
        g: Tensor | None = None,
        c: Tensor | None = None,
    ) -> None:
        """Point (slot, layer, group, slice) at one module's matrices; the table keeps them alive.

        Args:
            slot: in [0, N).
            layer: in [0, L).
            group: key of `GROUPS`.
            slice_index: index into `GROUPS[group]`.
            a: [r, K] contiguous, 1 <= r <= max_rank; of an embedding [K, r]; None for rank 0.
            b: [r, O of the slice] contiguous (transposed with respect to the file); None where `a` is.
            scaling: the module's own factor.
            g: [O] float32 contiguous, or None.
            c: [O] float32 contiguous, or None.
        """
        module = LoraModule(a, b, scaling, g, c)
        self._check_module(group, slice_index, module)
        row = (slot, layer, GROUP_INDEX[group], slice_index)
        self._modules[slot][layer, group, slice_index] = module
        self._host_entries[row] = _address(a), _address(b), module.rank, _address(g), _address(c)
        self._host_scalings[row] = scaling
        if not self._shares_memory:
            self.entries[row] = torch.from_numpy(self._host_entries[row])
            self.scalings[row] = scaling
        if len(self._modules[slot]) == 1:
            self.occupied[slot] = 1

    def clear(self, slot: int) -> None:
        """Empty a slot and let go of its tensors. No step that uses the slot may be running."""
        self._host_entries[slot] = 0
        self._host_scalings[slot] = torch.nan
        if not self._shares_memory:
            self.entries[slot] = 0
            self.scalings[slot] = torch.nan
        self.occupied[slot] = 0
        self._modules[slot] = {}
        self._buffers[slot] = None

    def poison(self, slot: int) -> None:
        """Let every place of an empty slot point to NaN, so that a stray read is seen; `clear` undoes it."""
        assert not self._is_taken(slot), "the slot is in use"
        if self._poison is None:
            matrix = torch.full((int(self.features.max()),), torch.nan, dtype=self.dtype, device=self.entries.device)
            self._poison = matrix, matrix.to(torch.float32)
        at_matrix, at_vector = map(_address, self._poison)
        self._host_entries[slot] = at_matrix, at_matrix, 1, at_vector, at_vector
        if not self._shares_memory:
            self.entries[slot] = torch.from_numpy(self._host_entries[slot])

    def find_module(self, slot: int, layer: int, group: str, slice_index: int) -> LoraModule | None:
        """The module at a place, None where the adapter does not target it.

        Raises:
            IndexError: the slot is empty.
        """
        if not self._is_taken(slot):
            raise IndexError(f"slot {slot} is empty; a row must never point to it")
        modules, place = self._modules[slot], (layer, group, slice_index)
        buffer = self._buffers[slot]
        if buffer is not None and place not in modules and self._host_entries[slot][_index(place)].any():
            modules[place] = self._view_module(slot, buffer, place)
        return modules.get(place)

    def targets(self, group: str, layer: int, slots: Iterable[int]) -> bool:
        """Whether any of the slots changes something in a group of a layer."""
        return bool(self._host_entries[list(slots), layer, GROUP_INDEX[group]].any())

    def width(self, group: str) -> int:
        """Columns of shrink's result for a group: `max_rank` for each slice."""
        return len(GROUPS[group]) * self.max_rank

    def _feature_rows(self, group: str) -> list[tuple[int, int, int]]:
        shape = self.shapes[group]
        rows = [(o, n, shape.in_features) for o, n in zip(shape.offsets, shape.out_features, strict=True)]
        return rows + [(0, 0, 0)] * (MAX_SLICES - len(rows))

    def _is_taken(self, slot: int) -> bool:
        return self._buffers[slot] is not None or bool(self._modules[slot])

    def _view_module(self, slot: int, buffer: Tensor, place: tuple[int, str, int]) -> LoraModule:
        """The tensors at a place of a slot that was set as a whole, for forms that need more than addresses."""
        _, group, slice_index = place
        in_features, out_features = self.shapes[group].in_features, self.shapes[group].out_features[slice_index]
        a, b, rank, g, c = self._host_entries[slot][_index(place)].tolist()

        def view(address: int, dtype: torch.dtype, *shape: int) -> Tensor | None:
            start = address - buffer.data_ptr()
            stop = start + dtype.itemsize * math.prod(shape)
            return buffer[start:stop].view(dtype).view(shape) if address else None

        a_shape = (in_features, rank) if group == EMBEDDING_GROUP else (rank, in_features)
        return LoraModule(
            view(a, self.dtype, *a_shape),
            view(b, self.dtype, rank, out_features),
            float(self._host_scalings[slot][_index(place)]),
            view(g, torch.float32, out_features),
            view(c, torch.float32, out_features),
        )

    def _check_rows(
        self, buffer: Tensor, groups: NDArray[np.int64], slices: NDArray[np.int64], entries: NDArray[np.int64]
    ) -> None:
        """Assert that the kernels will read nothing outside the buffer."""
        assert buffer.dtype is torch.uint8
        assert buffer.device == self.entries.device, f"the buffer lies on {buffer.device}"
        _, out_features, in_features = self._host_features[groups, slices].T
        ranks, starts = entries[:, 2], entries[:, POINTERS]
        assert out_features.all(), "a slice that its group does not have"
        assert ((ranks >= 0) & (ranks <= self.max_rank)).all(), f"a rank is outside 0..{self.max_rank}"
        assert ((starts[:, :2] < 0) == (ranks == 0)[:, None]).all(), "half a pair, or a rank without one"
        item, single = self.dtype.itemsize, torch.float32.itemsize
        sizes = np.stack(
            [ranks * in_features * item, ranks * out_features * item, *[out_features * single] * 2], axis=1
        )
        assert (np.where(starts < 0, 0, starts + sizes) <= buffer.numel()).all(), "the buffer is too short"
        assert ((starts < 0) | (starts % single == 0)).all(), "a start is not aligned"

    def _check_module(self, group: str, slice_index: int, module: LoraModule) -> None:
        shape = self.shapes[group]
        in_features, out_features = shape.in_features, shape.out_features[slice_index]
        where = f"{group}[{slice_index}]"
        assert (module.a is None) == (module.b is None), f"{where} has half a pair"
        if module.a is not None and module.b is not None:
            rank = module.rank
            assert 1 <= rank <= self.max_rank, f"rank {rank} is outside 1..{self.max_rank}"
            a_shape = (in_features, rank) if group == EMBEDDING_GROUP else (rank, in_features)
            self._check_tensor(f"A of {where}", module.a, a_shape, self.dtype)
            self._check_tensor(f"B of {where}", module.b, (rank, out_features), self.dtype)
        for name, vector in (("g", module.g), ("c", module.c)):
            if vector is not None:
                self._check_tensor(f"{name} of {where}", vector, (out_features,), torch.float32)

    def _check_tensor(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if self.dtype is torch.float64:
            # the ground truth of tests keeps everything in float64
            dtype = torch.float64
        assert tensor.shape == shape, f"{name} has shape {tuple(tensor.shape)}, not {shape}"
        assert tensor.dtype is dtype, f"{name} is {tensor.dtype}, not {dtype}"
        assert tensor.device == self.entries.device, f"{name} lies on {tensor.device}"
        assert tensor.is_contiguous(), f"{name} must be contiguous"


def _index(place: tuple[int, str, int]) -> tuple[int, int, int]:
    layer, group, slice_index = place
    return layer, GROUP_INDEX[group], slice_index


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
