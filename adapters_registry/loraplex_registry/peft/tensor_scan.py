"""Reads tensor bytes once, in bounded memory: their sha256 and whether every value is finite.

Infinity and NaN are found by their exponent bits, so bfloat16 needs no float type of its own.
"""

from __future__ import annotations

import hashlib
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.spec import TensorRef

CHUNK_BYTES = 1024 * 1024
"""A multiple of every element's width."""

_EXPONENT: dict[str, tuple[npt.DTypeLike, int]] = {
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


def scan_tensor(file: BinaryIO, ref: TensorRef) -> tuple[str, bool]:
    """Hash one tensor's bytes and look for values that are not finite.

    Args:
        file: the safetensors file, open for reading; its position is moved.
        ref: where the tensor lies; dtype F32, F16 or BF16 (others count as finite).

    Returns:
        The sha256 of the bytes in hex, and whether all values are finite.

    Raises:
        AdapterFileError: `truncated`, if the file ends before the tensor does.
    """
    digest, is_finite = hashlib.sha256(), True
    file.seek(ref.start)
    left = ref.stop - ref.start
    while left:
        chunk = file.read(min(left, CHUNK_BYTES))
        if len(chunk) < min(left, CHUNK_BYTES):
            message = f"The file ends inside {ref.name}; upload the whole file."
            raise AdapterFileError("truncated", message, ref.name)
        digest.update(chunk)
        is_finite = is_finite and is_all_finite(chunk, ref.dtype)
        left -= len(chunk)
    return digest.hexdigest(), is_finite


def is_all_finite(data: bytes, dtype: str) -> bool:
    """Whether no element of little-endian floats has an exponent of all ones."""
    if dtype not in _EXPONENT:
        return True
    width, mask = _EXPONENT[dtype]
    bits = np.frombuffer(data, width)
    return not bool(np.any((bits & mask) == mask))
