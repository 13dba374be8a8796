"""Packs a verified adapter: all that it changes, in the form in which the step reads it, into a nameless file.

Holds one matrix of the adapter and a few rows of the base at a time. Where things lie in the file is told by the facts
that go with it (`packed.py`). Knows numpy and no torch.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from loraplex_engine.core.module_group import EMBEDDING_GROUP, GROUP_INDEX, HEAD_GROUP, find_place
from loraplex_engine.lora.base_weights import BaseWeights
from loraplex_engine.lora.disk import VerifiedAdapter
from loraplex_engine.lora.epilogue import build_summand, column_norms, row_norms
from loraplex_engine.lora.packed import ALIGNMENT, LoadDone, PackedModule, PackedNorm, PackedRows
from loraplex_engine.lora.stored import ITEM_BYTES, as_served, read_chunks, read_tensor, round_to
from loraplex_engine.ops.lora.row import MODULE_ROW
from loraplex_registry.peft.spec import AdapterPlan, LoraModule, SavedTensor, TensorRef, TokenRows

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - files there have no name
_REPLACEABLE = {"embedding": GROUP_INDEX[EMBEDDING_GROUP], "head": GROUP_INDEX[HEAD_GROUP]}


class UnservableAdapterError(Exception):
    """The adapter's numbers cannot be served on this base; train it again."""


def pack(digest: str, adapter: VerifiedAdapter, base: BaseWeights) -> tuple[LoadDone, int]:
    """Write everything that the adapter changes to a nameless file in memory.

    Returns:
        The facts, and the file's descriptor, which the caller has to close.

    Raises:
        UnservableAdapterError: Its numbers or what it changes are to blame.
        BaseUnreadableError: The base's files are.
        ShortFileError: The adapter's file was cut since it was verified.
        OSError: There is no room.
    """
    started_at = time.monotonic()
    plan = adapter.plan
    with tempfile.TemporaryFile(dir=_memory_dir(_estimate_bytes(plan, base.dtype))) as target:
        with adapter.weights.open("rb") as source:
            packer = _Packer(source, _Arena(target), base)
            modules = packer.pack_modules(plan)
            lora_bytes = packer.arena.end
            norms, rows = packer.pack_replaced(plan)
        num_bytes = packer.arena.finish()
        descriptor = os.dup(target.fileno())
    facts = LoadDone(
        digest,
        num_bytes,
        plan.rank,
        modules,
        adapter.fetch_s,
        adapter.verify_s,
        time.monotonic() - started_at,
        norms,
        rows,
        plan.invocation_ids,
        _build_table(modules),
        num_bytes - lora_bytes if norms or rows else 0,
    )
    return facts, descriptor


class _Arena:
    """Appends arrays to a file, each at a multiple of `ALIGNMENT`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.end = 0

    def append(self, pieces: Iterable[NDArray[Any]]) -> int:
        """Write the pieces one after the other; returns where the first begins."""
        start = -(-self.end // ALIGNMENT) * ALIGNMENT
        self._file.seek(start)
        self.end = start + sum(self._file.write(piece.data.cast("B")) for piece in pieces)
        return start

    def finish(self) -> int:
        """Let the file be complete; returns its size, never 0."""
        self._file.flush()
        num_bytes = max(self.end, ALIGNMENT)
        self._file.truncate(num_bytes)
        return num_bytes


@dataclass(frozen=True, slots=True)
class _Packer:
    source: BinaryIO
    arena: _Arena
    base: BaseWeights

    def pack_modules(self, plan: AdapterPlan) -> tuple[PackedModule, ...]:
        biases = {saved.path: saved.ref for saved in plan.biases}
        # in the order in which a step reads them: a processor fetches ahead what lies ahead
        in_order = sorted(plan.modules, key=lambda module: _get_place(module.path))
        modules = [self._pack_lora(module, biases.pop(module.path, None)) for module in in_order]
        return (*modules, *(self._pack_bias(path, ref) for path, ref in biases.items()))

    def pack_replaced(self, plan: AdapterPlan) -> tuple[tuple[PackedNorm, ...], tuple[PackedRows, ...]]:
        """Norms, and rows of embedding and head; a tensor that stands in place of both is written once."""
        kinds = {saved.path: self.base.spec.modules[saved.path].kind for saved in plan.weights}
        norms = [self._pack_norm(saved) for saved in plan.weights if kinds[saved.path] == "norm"]
        ref_to_start: dict[TensorRef, int] = {}
        replaced: tuple[SavedTensor | TokenRows, ...] = (*plan.weights, *plan.token_rows)
        rows = [self._pack_rows(saved, ref_to_start) for saved in replaced if kinds.get(saved.path) != "norm"]
        if len({row.group for row in rows}) < len(rows):
            raise UnservableAdapterError("it replaces rows of one matrix in two ways")
        return tuple(norms), tuple(rows)

    def _pack_lora(self, module: LoraModule, trained: TensorRef | None) -> PackedModule:
        layer, group, slice_id = _get_place(module.path)
        # as the table has it: where a row almost cancels, its norm shows the difference
        scaling = float(np.float32(module.scaling))
        a, b = read_tensor(self.source, module.a), read_tensor(self.source, module.b)
        if module.is_transposed:
            a, b = a.T, b.T
        # a token's row of an embedding is a gather, so its A lies there by token
        a_start = self._append(a.T if group == GROUP_INDEX[EMBEDDING_GROUP] else a)
        b_start = self._append(b.T)
        g = self._scale_factor(module.path, module.magnitude, a, b, scaling) if module.magnitude is not None else None
        c = None
        if g is not None or trained is not None or module.bias is not None:
            c = build_summand(
                g,
                self.base.find_bias(module.path),
                self._read_vector(trained),
                self._read_vector(module.bias),
                scaling,
            )
        g_start, c_start = self._append_vector(module.path, g), self._append_vector(module.path, c)
        features = a.shape[1], b.shape[0]
        return PackedModule(layer, group, slice_id, module.rank, scaling, *features, a_start, b_start, g_start, c_start)

    def _pack_bias(self, path: str, ref: TensorRef) -> PackedModule:
        """A module whose bias alone was trained."""
        spec = self.base.spec.modules[path]
        c = build_summand(None, self.base.find_bias(path), self._read_vector(ref), None, 0.0)
        c_start = self._append_vector(path, c)
        return PackedModule(*_get_place(path), 0, 0.0, spec.in_features, spec.out_features, -1, -1, -1, c_start)

    def _scale_factor(
        self, path: str, magnitude: TensorRef, a: NDArray[np.float32], b: NDArray[np.float32], scaling: float
    ) -> NDArray[np.float64]:
        """DoRA's g as the step will use it, rounded to float32."""
        norms_of = column_norms if self.base.spec.modules[path].kind == "embedding" else row_norms
        dtype = self.base.dtype
        norms = norms_of(self.base.read_rows(path), as_served(a, dtype), as_served(b, dtype), scaling)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            g = read_tensor(self.source, magnitude) / norms
            return g.astype(np.float32).astype(np.float64)

    def _pack_norm(self, saved: SavedTensor) -> PackedNorm:
        return PackedNorm(saved.path, saved.ref.shape[0], self._append(read_tensor(self.source, saved.ref)))

    def _pack_rows(self, saved: SavedTensor | TokenRows, ref_to_start: dict[TensorRef, int]) -> PackedRows:
        ref = saved.ref
        group = _REPLACEABLE.get(self.base.spec.modules[saved.path].kind)
        if group is None:
            raise UnservableAdapterError(f"the engine has no place for rows of {saved.path}")
        if ref not in ref_to_start:
            chunks = read_chunks(self.source, ref)
            ref_to_start[ref] = self.arena.append(round_to(rows, self.base.dtype) for _, rows in chunks)
        token_ids = saved.token_ids if isinstance(saved, TokenRows) else ()
        num_rows, width = ref.shape
        return PackedRows(group, token_ids, num_rows, width, ref_to_start[ref])

    def _read_vector(self, ref: TensorRef | None) -> NDArray[np.float64] | None:
        return None if ref is None else read_tensor(self.source, ref).astype(np.float64)

    def _append(self, values: NDArray[np.float32]) -> int:
        return self.arena.append([round_to(values, self.base.dtype)])

    def _append_vector(self, path: str, values: NDArray[np.float64] | None) -> int:
        if values is None:
            return -1
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float32)
        if not np.isfinite(rounded).all():
            raise UnservableAdapterError(f"the scale or bias of {path} is not finite")
        return self.arena.append([rounded])


def _build_table(modules: tuple[PackedModule, ...]) -> bytes:
    rows = [
        ((m.layer, m.group, m.slice_id), (m.a_start, m.b_start, m.rank, m.g_start, m.c_start), m.scaling)
        for m in modules
    ]
    return np.array(rows, dtype=MODULE_ROW).tobytes()


def _get_place(path: str) -> tuple[int, int, int]:
    place = find_place(path)
    if place is None:
        raise UnservableAdapterError(f"the engine has no place for LoRA on {path}")
    return place


def _estimate_bytes(plan: AdapterPlan, dtype: str) -> int:
    """Size of the packed matrices; vectors and gaps hardly count."""
    refs = [ref for module in plan.modules for ref in (module.a, module.b)]
    refs += [saved.ref for saved in plan.weights] + [rows.ref for rows in plan.token_rows]
    return sum(prod(ref.shape) for ref in refs) * ITEM_BYTES[dtype]


def _memory_dir(num_bytes: int) -> str | None:
    """The machine's memory file system when it has room, else the temporary folder."""
    try:
        stats = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return _SHARED_MEMORY if stats.f_bavail * stats.f_frsize > 2 * num_bytes else None
