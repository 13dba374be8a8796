"""The reader of the library `gguf`, held to what a file can hold: lengths in a damaged file lead it nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGUFReader

# A vocabulary of 256 K with its merges, scores and types takes under two million; each is an array of its own.
_MAX_PARTS = 1 << 23


class BoundedReader(GGUFReader):  # type: ignore[misc]
    """A `GGUFReader` in which a part beyond the file's end, and a file of too many parts, is a ValueError.

    The library slices a mapped file, and past its end a slice is empty: an array of 2**63 elements would be read
    element by element from nothing.
    """

    _num_parts = 0

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        self._num_parts += 1
        end = offset + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, and a part of it at {end}")
        if self._num_parts > _MAX_PARTS:
            raise ValueError(f"it has more than {_MAX_PARTS} parts")
        return super()._get(offset, dtype, count, override_order)
