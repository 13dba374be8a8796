"""Writes a safetensors file one tensor at a time, so that a conversion holds one piece of one tensor. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType

from loraplex_engine.weights.index import ITEM_BYTES


class StreamWriter:
    """Appends tensors in the order announced; use as a context manager.

    Args:
        file: Created.
        shapes: Name to shape of every tensor, in the order in which they will be written.
        dtype: Of all of them, as safetensors spells it.
    """

    def __init__(self, file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> None:
        self._sizes = {name: prod(shape) * ITEM_BYTES[dtype] for name, shape in shapes.items()}
        self._waiting = list(shapes)
        self._stream = file.open("wb")
        self._stream.write(_header(shapes, self._sizes, dtype))
        self._left = 0
        self._hash = hashlib.sha256()
        self.hashes: dict[str, str] = {}

    def write(self, name: str, piece: bytes | memoryview) -> None:
        """Append a piece of the tensor `name`; its pieces come one after the other."""
        if not self._left:
            assert self._waiting.pop(0) == name, f"{name} is out of order"
            self._left, self._hash = self._sizes[name], hashlib.sha256()
        self._hash.update(piece)
        self._left -= self._stream.write(piece)
        if not self._left:
            self.hashes[name] = self._hash.hexdigest()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            assert not self._left, "a tensor is incomplete"
            assert not self._waiting, f"{self._waiting[0]} was not written"
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self._stream.close()


def _header(shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int], dtype: str) -> bytes:
    items: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        items[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + sizes[name]]}
        offset += sizes[name]
    text = json.dumps(items, separators=(",", ":")).encode()
    # padded so that the data begin at a multiple of 8
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
