"""A base's weights in float32 with an adapter merged into them, a few rows of a matrix at a time.

By the plain formulas, from the files of both: `W' = W + s B A`, with DoRA `m W' / ||W'||`, whole tensors and rows in
place of the base's, biases. Nothing here is shared with the code that packs an adapter for its slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loraplex_engine.lora.stored import StoredTensor, read_chunks, read_tensor
from loraplex_engine.weights.index import TensorEntry, read_index
from loraplex_registry.peft.spec import AdapterPlan, BaseSpec, LoraModule, TensorRef

Array = NDArray[np.float32]


class Piece(NamedTuple):
    """Some rows of a module: outputs `span`; the base's and the merged ones, which are None where nothing changes."""

    span: slice
    rows: Array
    bias: Array | None
    own_rows: Array | None
    own_bias: Array | None


class _Delta(NamedTuple):
    """The matrices of one LoRA module: a [r, K], b [O, r], as numbers."""

    a: Array
    b: Array
    scaling: float
    magnitude: Array | None
    bias: Array | None

    def rows(self, span: slice) -> Array:
        """S B A for some outputs, [n, K]."""
        return np.float32(self.scaling) * (self.b[span] @ self.a)


class _Row(NamedTuple):
    """One row of a stored matrix, as a tensor of its own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


class MergedBase:
    """Base and merged adapter, read from their files as they are asked for; use it in a `with`."""

    def __init__(self, folder: Path, spec: BaseSpec, plan: AdapterPlan, weights: Path) -> None:
        """Open the adapter's file.

        Args:
            folder: of the base.
            spec: the base's modules.
            plan: what the adapter changes.
            weights: its safetensors file.
        """
        self._spec = spec
        self._index = read_index(folder)
        self._embedding = next(path for path, module in spec.modules.items() if module.kind == "embedding")
        self._modules = {module.path: module for module in plan.modules}
        self._saved = {saved.path: saved.ref for saved in plan.weights}
        self._biases = {saved.path: saved.ref for saved in plan.biases}
        self._token_rows = {rows.path: rows for rows in plan.token_rows}
        self._open_files: dict[Path, BinaryIO] = {}
        self._stack = ExitStack()
        self._adapter = self._stack.enter_context(weights.open("rb"))

    def __enter__(self) -> MergedBase:
        """Keep the files open until the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close them."""
        self._stack.close()

    def read_pieces(self, path: str) -> Iterator[Piece]:
        """Yield a linear or a head from its first output to its last."""
        delta = self._read_delta(path)
        bias = self._read_base(f"{path}.bias") if self._spec.modules[path].has_bias else None
        trained = self._read_own(self._biases.get(path))
        is_changed = delta is not None or path in self._saved or path in self._token_rows
        tied = self._spec.modules[path].tied
        chunks = self._chunks(f"{self._embedding if tied else path}.weight")
        replaced = read_chunks(self._adapter, self._saved[path]) if path in self._saved else None
        for span, rows in chunks:
            own_rows = rows if replaced is None else next(replaced)[1]
            own_bias = _cut(bias if trained is None else trained, span)
            if is_changed:
                own_rows = self._replace(path, span, own_rows)
            if delta is not None:
                own_rows, own_bias = _merge(delta, span, own_rows, own_bias)
            is_own = is_changed or trained is not None
            yield Piece(span, rows, _cut(bias, span), own_rows if is_own else None, own_bias)

    def read_norm(self, path: str) -> tuple[Array, Array]:
        """The gain of a norm: the base's, and the adapter's or the same."""
        gain = self._read_base(f"{path}.weight")
        return gain, self._read_own(self._saved.get(path), gain)

    def read_embedded(self, token_ids: NDArray[np.int64]) -> tuple[Array, Array]:
        """Embedded tokens [n, E]: the base's, and the adapter's."""
        path = self._embedding
        entry = self._index[f"{path}.weight"]
        rows = _read_rows(self._file(entry), entry, token_ids)
        saved = self._saved.get(path)
        own = rows.copy() if saved is None else _read_rows(self._adapter, saved, token_ids)
        if (trained := self._token_rows.get(path)) is not None:
            values = read_tensor(self._adapter, trained.ref)
            for row, token_id in zip(values, trained.token_ids, strict=True):
                own[token_ids == token_id] = row
        delta = self._read_delta(path)
        if delta is not None:
            own += np.float32(delta.scaling) * (delta.a[:, token_ids].T @ delta.b.T)
            if delta.magnitude is not None:
                own *= delta.magnitude / self._column_norms(path, delta)
        return rows, own

    def _column_norms(self, path: str, delta: _Delta) -> Array:
        """Norms [E] of the columns of an embedding with its delta."""
        squares = np.zeros(delta.b.shape[0])
        for span, rows in self._chunks(f"{path}.weight"):
            merged = rows + np.float32(delta.scaling) * (delta.a[:, span].T @ delta.b.T)
            squares += np.square(merged, dtype=np.float64).sum(0)
        return np.sqrt(squares).astype(np.float32)

    def _replace(self, path: str, span: slice, rows: Array) -> Array:
        """Put trained rows of a head in their places."""
        trained = self._token_rows.get(path)
        if trained is None:
            return rows
        values, rows = read_tensor(self._adapter, trained.ref), rows.copy()
        for row, token_id in zip(values, trained.token_ids, strict=True):
            if span.start <= token_id < span.stop:
                rows[token_id - span.start] = row
        return rows

    def _read_delta(self, path: str) -> _Delta | None:
        module: LoraModule | None = self._modules.get(path)
        if module is None:
            return None
        a, b = self._read_own(module.a), self._read_own(module.b)
        assert a is not None
        assert b is not None
        if module.is_transposed:
            a, b = a.T, b.T
        return _Delta(a, b, module.scaling, self._read_own(module.magnitude), self._read_own(module.bias))

    def _chunks(self, name: str) -> Iterator[tuple[slice, Array]]:
        entry = self._index[name]
        return read_chunks(self._file(entry), entry)

    def _read_base(self, name: str) -> Array:
        entry = self._index[name]
        return read_tensor(self._file(entry), entry)

    def _read_own(self, ref: TensorRef | None, default: Any = None) -> Any:
        return default if ref is None else read_tensor(self._adapter, ref)

    def _file(self, entry: TensorEntry) -> BinaryIO:
        if entry.file not in self._open_files:
            self._open_files[entry.file] = self._stack.enter_context(entry.file.open("rb"))
        return self._open_files[entry.file]


def _merge(delta: _Delta, span: slice, rows: Array, bias: Array | None) -> tuple[Array, Array | None]:
    """Rows and bias with a LoRA module merged in; DoRA scales the product, not the base's bias."""
    rows = rows + delta.rows(span)
    factor: Array | None = None
    if delta.magnitude is not None:
        norms = np.sqrt(np.square(rows, dtype=np.float64).sum(1)).astype(np.float32)
        factor = delta.magnitude[span] / norms
        rows *= factor[:, None]
    if delta.bias is not None:
        own = np.float32(delta.scaling) * delta.bias[span]
        own = own if factor is None else own * factor
        bias = own if bias is None else bias + own
    return rows, bias


def _read_rows(file: BinaryIO, matrix: StoredTensor, indices: NDArray[np.int64]) -> Array:
    """Some rows of a stored matrix, [n, width], in the order asked for."""
    width = matrix.shape[1]
    num_bytes = width * {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}[matrix.dtype]
    places = [_Row(matrix.name, matrix.dtype, (width,), matrix.start + int(index) * num_bytes) for index in indices]
    return np.stack([read_tensor(file, place) for place in places])


def _cut(values: Array | None, span: slice) -> Array | None:
    return None if values is None else values[span]
