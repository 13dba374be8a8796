"""Hashes of a base's embedding and head in each dtype that adapters are saved in: a copy of them is known by these.

numpy only, a piece at a time. Casts round to nearest even, as PEFT's do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from loraplex_engine.errors import BaseUnsupportedError
from loraplex_engine.models.layout import EMBEDDING, HEAD
from loraplex_engine.weights.index import ITEM_BYTES, TensorEntry

Floats = npt.NDArray[np.float32]

_PIECE_ITEMS = 1 << 20
_CASTS = ("F32", "F16", "BF16")


def hash_matrices(index: Mapping[str, TensorEntry], *, is_tied: bool) -> dict[str, dict[str, str]]:
    """Module path to dtype to sha256 (hex) of the embedding's and, where it has its own matrix, the head's bytes.

    Raises:
        BaseUnsupportedError: A file is shorter than its header says.
    """
    paths = (EMBEDDING,) if is_tied else (EMBEDDING, HEAD)
    return {path: _hash_casts(index[f"{path}.weight"]) for path in paths}


def _hash_casts(entry: TensorEntry) -> dict[str, str]:
    hashes = {dtype: hashlib.sha256() for dtype in _CASTS}
    for values in _read_pieces(entry):
        for dtype, digest in hashes.items():
            digest.update(cast(values, dtype))
    return {dtype: digest.hexdigest() for dtype, digest in hashes.items()}


def _read_pieces(entry: TensorEntry) -> Iterator[Floats]:
    with entry.file.open("rb") as stream:
        stream.seek(entry.start)
        left = entry.stop - entry.start
        while left:
            piece = stream.read(min(left, _PIECE_ITEMS * ITEM_BYTES[entry.dtype]))
            if not piece:
                raise BaseUnsupportedError(f"{entry.file} was cut short while it was read.")
            left -= len(piece)
            yield _as_float32(piece, entry.dtype)


def _as_float32(data: bytes, dtype: str) -> Floats:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).astype("<f4")


def cast(values: Floats, dtype: str) -> bytes:
    """Finite float32 values as little-endian bytes of F32, F16 or BF16."""
    if dtype == "BF16":
        bits: npt.NDArray[np.uint32] = values.view("<u4")
        rounded = (bits + ((bits >> 16 & 1) + np.uint32(0x7FFF))) >> 16
        return bytes(rounded.astype("<u2"))
    with np.errstate(over="ignore"):
        return bytes(values.astype({"F32": "<f4", "F16": "<f2"}[dtype]))
