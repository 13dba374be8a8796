"""Reads tensor bytes once, in bounded memory: their sha256 and their largest magnitude.

Floats of one sign are ordered as their bits are, so that the largest magnitude is found on integers: bfloat16 needs no
float type of its own, and infinity and NaN are larger than all numbers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.spec import TensorRef

CHUNK_BYTES = 1024 * 1024
"""A multiple of every element's width."""
_MIN_BYTES_PER_THREAD = 8 * CHUNK_BYTES

_WORDS: dict[str, tuple[npt.DTypeLike, npt.DTypeLike, int]] = {
    "F32": ("<i4", "<u4", 0x7FFF_FFFF),
    "F16": ("<i2", "<u2", 0x7FFF),
    "BF16": ("<i2", "<u2", 0x7FFF),
}
"""Of each served dtype: its bits as signed and as unsigned numbers, and what is left of them without the sign."""
_INFINITY = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}

# bits, as float32, from which on a number rounds to infinity, and up to which it rounds to zero
_RANGES = {"bfloat16": (0x7F7F_8000, 0x0000_8000), "float16": (0x477F_F000, 0x3300_0000)}


class TensorScan(NamedTuple):
    """`sha256` of a tensor's bytes in hex, and the bits of its largest magnitude, 0 for dtypes that are not served."""

    sha256: str
    dtype: str
    peak: int

    @property
    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite."""
        return self.peak < _INFINITY.get(self.dtype, 1)

    @property
    def is_zero(self) -> bool:
        """Whether all values are zero."""
        return self.dtype in _WORDS and not self.peak

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        if self.dtype == "F16":
            return float(np.uint16(self.peak).view(np.float16))
        return float(np.uint32(self._peak32()).view(np.float32))

    def describe_range(self) -> str:
        """What becomes of values in a narrower dtype, as the end of a sentence; empty if nothing does.

        Infinity is told where one value becomes it, zero only where all do: small values beside large ones are usual.
        """
        for dtype, (infinite_from, zero_up_to) in _RANGES.items():
            # float16 fits into float32 and, but for its last bits, into bfloat16
            if self.dtype == "F16" or not self.peak:
                return ""
            if self._peak32() >= infinite_from:
                return f"holds values up to {self.largest:.3g}, which are infinite in {dtype}"
            if self._peak32() <= zero_up_to:
                return f"holds no value above {self.largest:.3g}, so that all of it is zero in {dtype}"
        return ""

    def _peak32(self) -> int:
        return self.peak << 16 if self.dtype == "BF16" else self.peak


def scan_tensors(descriptor: int, refs: Sequence[TensorRef], threads: int) -> list[TensorScan]:
    """Scan tensors, several at once where that is worth a thread.

    Args:
        descriptor: the safetensors file, open for reading; its position is left alone.
        refs: where the tensors lie.
        threads: at most so many.

    Raises:
        AdapterFileError: `truncated`, if the file ends before one of them does.
        OSError: the file cannot be read.
    """
    size = sum(ref.stop - ref.start for ref in refs)
    threads = min(threads, size // _MIN_BYTES_PER_THREAD)
    if threads < 2:
        return [scan_tensor(descriptor, ref) for ref in refs]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda ref: scan_tensor(descriptor, ref), refs))


def scan_tensor(descriptor: int, ref: TensorRef) -> TensorScan:
    """Scan one tensor. Raises as `scan_tensors`."""
    digest, peak = hashlib.sha256(), 0
    buffer = bytearray(min(CHUNK_BYTES, ref.stop - ref.start))
    for start in range(ref.start, ref.stop, CHUNK_BYTES):
        chunk = memoryview(buffer)[: min(CHUNK_BYTES, ref.stop - start)]
        _read_into(descriptor, chunk, start, ref)
        digest.update(chunk)
        peak = max(peak, find_peak(chunk, ref.dtype))
    return TensorScan(digest.hexdigest(), ref.dtype, peak)


def _read_into(descriptor: int, chunk: memoryview, start: int, ref: TensorRef) -> None:
    while chunk:
        count = os.preadv(descriptor, [chunk], start)
        if not count:
            message = f"The file ends inside {ref.name}; upload the whole file."
            raise AdapterFileError("truncated", message, ref.name)
        chunk, start = chunk[count:], start + count


def find_peak(data: bytes | memoryview, dtype: str) -> int:
    """Return the bits of the largest magnitude of little-endian floats, without its sign."""
    if dtype not in _WORDS or not data:
        return 0
    signed, unsigned, mask = _WORDS[dtype]
    # the largest of the positive ones, and, as their sign is the highest bit, of the negative ones
    positive = int(np.frombuffer(data, signed).max())
    negative = int(np.frombuffer(data, unsigned).max())
    return max(positive, negative & mask if negative > mask else 0, 0)
