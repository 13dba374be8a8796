"""Numbers of safetensors files in numpy: read from a byte range, rounded to the dtype that the model computes in.

Reads instead of mapping: a file that was cut short behind our back is then an error of one load, not the end of the
process. bfloat16 is handled as its bits, because numpy has no such type.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Dtypes that a model may compute in."""

_STORED: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_CHUNK_ITEMS = 1 << 18
"""Numbers read at once; as float64 they fit a core's cache."""


class StoredTensor(Protocol):
    """A tensor's place: bytes [start, stop) of its file."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def start(self) -> int: ...  # noqa: D102


class ShortFileError(Exception):
    """A file ends before a tensor that its header announced."""


def read_tensor(file: BinaryIO, tensor: StoredTensor) -> NDArray[np.float32]:
    """Return the tensor as float32, whatever it is stored as.

    Raises:
        ShortFileError: The file was cut since its header was read.
    """
    return _read(file, tensor, 0, prod(tensor.shape)).reshape(tensor.shape)


def read_chunks(file: BinaryIO, tensor: StoredTensor) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Yield a matrix as float32 a few rows at a time, each with its span of rows.

    Raises:
        ShortFileError: The file was cut since its header was read.
    """
    num_rows, width = tensor.shape
    step = max(1, _CHUNK_ITEMS // width)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        yield slice(first, last), _read(file, tensor, first * width, last * width).reshape(-1, width)


def round_to(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """The bytes of `values` in the model's dtype, in the shape of `values`; bfloat16 as its bits."""
    return to_bfloat16(values) if dtype == "bfloat16" else np.ascontiguousarray(values)


def as_served(values: NDArray[np.float32], dtype: str) -> NDArray[np.float64]:
    """What the model computes with: `values` rounded to its dtype."""
    rounded = _widen(to_bfloat16(values)) if dtype == "bfloat16" else values
    return rounded.astype(np.float64)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite float32 to the nearest bfloat16, ties to even, as its bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _read(file: BinaryIO, tensor: StoredTensor, first: int, last: int) -> NDArray[np.float32]:
    stored = _STORED[tensor.dtype]
    num_bytes = (last - first) * stored.itemsize
    file.seek(tensor.start + first * stored.itemsize)
    data = file.read(num_bytes)
    if len(data) < num_bytes:
        raise ShortFileError(f"the file of {tensor.name} is shorter than its header says")
    raw: NDArray[Any] = np.frombuffer(data, dtype=stored)
    return _widen(raw) if tensor.dtype == "BF16" else raw.astype(np.float32)


def _widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
