"""Reads the header of a safetensors file within bounds: which tensors lie where, and that they cover the file exactly.

Memory is bounded by the header's own limit whatever the bytes say. It knows nothing of LoRA, and no torch: the format
is eight bytes of length, a JSON object, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from loraplex_registry.peft.errors import AdapterFileError, JsonError
from loraplex_registry.peft.findings import show
from loraplex_registry.peft.magic import PEEK_BYTES, find_foreign_format
from loraplex_registry.peft.spec import TensorRef
from loraplex_registry.peft.strict_json import check_text, parse_objects

MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 8
MAX_NAME_LENGTH = 512

_LENGTH_BYTES = 8
# in honest headers a tensor has 3 brackets, 4 colons and, with all dimensions, 11 commas
_MAX_COUNTS = ((b"[{", 5 * MAX_TENSORS), (b":", 6 * MAX_TENSORS), (b",", 12 * MAX_TENSORS))
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
}
"""Bytes of one element of each safetensors dtype that is a whole number of bytes wide."""


class TensorTable(msgspec.Struct, frozen=True):
    """A validated header: `tensors` in the order of their bytes, which follow each other from `data_start` to `size`.

    `size` is that of the file in bytes, `metadata` the free text beside the tensors.
    """

    tensors: tuple[TensorRef, ...]
    metadata: dict[str, str]
    data_start: int
    size: int


def read_header(path: Path) -> TensorTable:
    """Read and validate the header of a safetensors file.

    Args:
        path: the file; its name is the subject of errors about the file as a whole.

    Raises:
        AdapterFileError: one of the checks `lfs_pointer`, `pickle`, `format`, `truncated` or `header` fails.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return read_open_header(file, path.name)


def read_open_header(file: BinaryIO, subject: str) -> TensorTable:
    """As `read_header`, from an open file; leaves its position anywhere."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    for check, message in find_foreign_format(file.read(PEEK_BYTES)):
        raise AdapterFileError(check, message, subject)
    header = _read_header_bytes(file, size, subject)
    entries = _parse_header(header, subject)
    data_start = _LENGTH_BYTES + len(header)
    metadata = _take_metadata(entries, subject)
    refs = sorted((_build_ref(name, entry, data_start) for name, entry in entries.items()), key=_byte_range)
    _check_coverage(refs, data_start, size, subject)
    return TensorTable(tuple(refs), metadata, data_start, size)


def _read_header_bytes(file: BinaryIO, size: int, subject: str) -> bytes:
    if size < _LENGTH_BYTES:
        raise AdapterFileError("truncated", f"The file has only {size} bytes; upload the whole file.", subject)
    file.seek(0)
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise _header_fault(f"it claims {length} bytes, more than {MAX_HEADER_BYTES}", subject)
    if _LENGTH_BYTES + length > size:
        message = f"The header should take {length} bytes but the file has {size}; upload the whole file."
        raise AdapterFileError("truncated", message, subject)
    return file.read(length)


def _parse_header(header: bytes, subject: str) -> dict[str, Any]:
    if not header.startswith(b"{"):
        raise _header_fault("it does not start with a brace", subject)
    # NOTE: bounds what the JSON parser may allocate, far above what MAX_TENSORS honest entries need
    if any(sum(map(header.count, signs)) > most for signs, most in _MAX_COUNTS):
        raise _header_fault(f"it holds more values than {MAX_TENSORS} tensors need", subject)
    try:
        entries = parse_objects(header, _parse_size if b"-0" in header else None)
    except JsonError as error:
        raise _header_fault(str(error), subject) from None
    if not isinstance(entries, dict):
        raise _header_fault("it is not a JSON object", subject)
    if len(entries) > MAX_TENSORS + 1:
        raise _header_fault(f"it lists more than {MAX_TENSORS} tensors", subject)
    return entries


def _parse_size(text: str) -> int:
    """Return an integer; the library takes -0 for a fraction, and refuses it."""
    if text == "-0":
        raise JsonError("-0 is no size")
    return int(text)


def _take_metadata(entries: dict[str, Any], subject: str) -> dict[str, str]:
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _header_fault("its __metadata__ is not a map of strings", subject)
    try:
        check_text("".join((*metadata, *metadata.values())))
    except JsonError as error:
        raise _header_fault(f"in its __metadata__ {error}", subject) from None
    return metadata


def _build_ref(name: str, entry: Any, data_start: int) -> TensorRef:
    _check_name(name)
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise _header_fault(f"{show(name)} needs exactly dtype, shape and data_offsets", name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _header_fault(f"{show(name)} has the unknown dtype {show(dtype)}", name)
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _header_fault(f"{show(name)} has no valid shape", name)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _header_fault(f"{show(name)} has no valid data_offsets", name)
    if math.prod(shape) * DTYPE_BYTES[dtype] != offsets[1] - offsets[0]:
        raise _header_fault(f"{show(name)} has {offsets[1] - offsets[0]} bytes, not what {dtype}{shape} takes", name)
    return TensorRef(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise _header_fault(f"a tensor's name is empty or longer than {MAX_NAME_LENGTH} characters", show(name))
    try:
        check_text(name)
    except JsonError as error:
        raise _header_fault(str(error), show(name)) from None


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)


def _byte_range(ref: TensorRef) -> tuple[int, int]:
    return ref.start, ref.stop


def _check_coverage(refs: Iterable[TensorRef], data_start: int, size: int, subject: str) -> None:
    """Each tensor starts where the one before stopped, and the last stops where the file does."""
    stop = data_start
    for ref in refs:
        if ref.start != stop:
            fault = "overlaps the tensor before it" if ref.start < stop else f"leaves {ref.start - stop} bytes unused"
            raise _header_fault(f"{show(ref.name)} {fault}", ref.name)
        stop = ref.stop
    if stop > size:
        message = f"The tensors should end at byte {stop} but the file has {size} bytes; upload the whole file."
        raise AdapterFileError("truncated", message, subject)
    if stop < size:
        raise _header_fault(f"{size - stop} bytes follow the last tensor", subject)


def _header_fault(fault: str, subject: str) -> AdapterFileError:
    return AdapterFileError(
        "header", f"The safetensors header is damaged: {fault}; save the adapter again with PEFT.", subject
    )
