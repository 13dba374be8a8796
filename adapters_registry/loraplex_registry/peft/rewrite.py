"""Writes a safetensors file again without some of its tensors; the bytes of the others and the metadata stay."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from loraplex_registry.peft.header import read_header

_COPY_BYTES = 1024 * 1024
_ALIGNMENT = 8


def drop_tensors(source: Path, target: Path, names: Collection[str]) -> None:
    """Write `source` to `target`, a new file, without the tensors `names`.

    Args:
        source: a file that passed the checks.
        target: where to; overwritten.
        names: tensors to leave out; others are written in the order of their bytes.

    Raises:
        AdapterFileError: the source is no safetensors file.
        OSError: a file cannot be read or written.
    """
    table = read_header(source)
    kept = [ref for ref in table.tensors if ref.name not in names]
    header: dict[str, Any] = {"__metadata__": table.metadata} if table.metadata else {}
    stop = 0
    for ref in kept:
        start, stop = stop, stop + ref.stop - ref.start
        header[ref.name] = {"dtype": ref.dtype, "shape": list(ref.shape), "data_offsets": [start, stop]}
    # NOTE: as it is, so that no header grows past the limit that every reader holds it to
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with source.open("rb") as reader, target.open("wb") as writer:
        writer.write(len(text).to_bytes(8, "little") + text)
        for ref in kept:
            reader.seek(ref.start)
            for start in range(ref.start, ref.stop, _COPY_BYTES):
                writer.write(reader.read(min(_COPY_BYTES, ref.stop - start)))
