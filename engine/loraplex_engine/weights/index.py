"""Where each tensor of a base lies: safetensors headers of one file or of shards with an index. No torch.

Reads headers only; whoever needs bytes maps the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from loraplex_engine.errors import BaseUnsupportedError

SINGLE_FILE, SHARD_INDEX = "model.safetensors", "model.safetensors.index.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: bytes [start, stop) of its file, header included in the count."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a base's folder: the single one, or the shards that the index names, sorted.

    Raises:
        BaseUnsupportedError: there are none, or a shard is missing.
    """
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    if not (folder / SHARD_INDEX).exists():
        raise BaseUnsupportedError(f"There is no {SINGLE_FILE} and no {SHARD_INDEX} in {folder}.")
    names = _read_shard_names(folder / SHARD_INDEX)
    if strange := [name for name in names if not name or Path(name).name != name]:
        raise BaseUnsupportedError(f"{SHARD_INDEX} names a file outside the folder: {strange[0]!r}.")
    files = sorted(folder / name for name in names)
    if missing := [file.name for file in files if not file.exists()]:
        raise BaseUnsupportedError(f"The shard {missing[0]!r} is missing in {folder}.")
    return files


def _read_shard_names(file: Path) -> set[str]:
    try:
        names = json.loads(file.read_bytes())["weight_map"].values()
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise BaseUnsupportedError(f"{file} does not say which shard holds which tensor.") from None
    if not all(isinstance(name, str) and "\0" not in name for name in names):
        raise BaseUnsupportedError(f"{file} names a shard by something else than a name.")
    return set(names)


def read_index(folder: Path) -> dict[str, TensorEntry]:
    """Name to entry of every tensor of a base, sorted by name.

    Raises:
        BaseUnsupportedError: a file is not a whole safetensors file, or a tensor has a dtype that is not served.
    """
    entries = [entry for file in weight_files(folder) for entry in read_header(file)]
    index = {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}
    if len(index) != len(entries):
        raise BaseUnsupportedError(f"A tensor lies in two files of {folder}.")
    return index


def read_header(file: Path) -> Iterator[TensorEntry]:
    """The tensors of one safetensors file, in the order of its header."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise BaseUnsupportedError(f"{file} is not a whole safetensors file.")
        header = _parse_header(file, stream.read(length))
    for name, item in header.items():
        yield _entry(file, name, item, data_start=8 + length, size=size)


def _parse_header(file: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise BaseUnsupportedError(f"The header of {file} is not JSON.") from None
    if not isinstance(header, dict):
        raise BaseUnsupportedError(f"The header of {file} is not a JSON object.")
    header.pop("__metadata__", None)
    return header


def _entry(file: Path, name: str, item: dict[str, Any], data_start: int, size: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = item["dtype"], tuple(map(int, item["shape"])), map(int, item["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise BaseUnsupportedError(f"The header of {file} does not say where the tensor {name} lies.") from None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise BaseUnsupportedError(f"The tensor {name} is {dtype}; served are {', '.join(ITEM_BYTES)}.")
    if (
        begin < 0
        or min(shape, default=0) < 0
        or end - begin != prod(shape) * ITEM_BYTES[dtype]
        or data_start + end > size
    ):
        raise BaseUnsupportedError(f"{file} is cut short: the tensor {name} does not fit.")
    return TensorEntry(name, dtype, shape, file, data_start + begin, data_start + end)


def hash_tensors(entries: Iterable[TensorEntry]) -> dict[str, str]:
    """Name to `sha256` (hex) of each tensor's bytes, sorted by name; reads every file once, a piece at a time."""
    ordered = sorted(entries, key=lambda entry: (entry.file, entry.start))
    hashes: dict[str, str] = {}
    for file, items in groupby(ordered, key=lambda entry: entry.file):
        with file.open("rb") as stream:
            hashes |= {entry.name: _hash_range(stream, entry.start, entry.stop) for entry in items}
    return dict(sorted(hashes.items()))


def _hash_range(stream: BinaryIO, start: int, stop: int) -> str:
    digest = hashlib.sha256()
    stream.seek(start)
    while start < stop:
        piece = stream.read(min(_PIECE_BYTES, stop - start))
        digest.update(piece)
        start += len(piece)
    return digest.hexdigest()
