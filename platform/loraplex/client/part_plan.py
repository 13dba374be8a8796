"""What an upload in parts announces: the size and sha256 of each file, and of each part of it. Reads, sends nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PART_SIZE = 16 << 20
"""Bytes of a part: small enough that a cut costs little, large enough that 8 GiB are 512 parts."""
_CHUNK_SIZE = 1 << 20


@dataclass(frozen=True)
class FilePlan:
    """A file as it is announced: size in bytes, sha256 in hex of the whole and of each part of `part_size` bytes."""

    path: Path
    size: int
    sha256: str
    part_size: int
    part_sha256: tuple[str, ...]

    def announce(self) -> dict[str, object]:
        """Return what the API is told of it."""
        return {
            "name": self.path.name,
            "size": self.size,
            "sha256": self.sha256,
            "part_size": self.part_size,
            "part_sha256": list(self.part_sha256),
        }


def plan_file(path: Path, on_read: Callable[[int], None], part_size: int = PART_SIZE) -> FilePlan:
    """Return the plan of one file, which is read once.

    Args:
        path: The file; only a part's share of memory is taken, whatever its size.
        on_read: Told of bytes as they are read.
        part_size: Bytes of each part but the last.
    """
    whole, parts, size = hashlib.sha256(), [], 0
    with path.open("rb", buffering=0) as file:
        while True:
            part, num_left = hashlib.sha256(), part_size
            while num_left and (chunk := file.read(min(_CHUNK_SIZE, num_left))):
                whole.update(chunk)
                part.update(chunk)
                num_left -= len(chunk)
                on_read(len(chunk))
            if num_left == part_size:
                break
            size += part_size - num_left
            parts.append(part.hexdigest())
    return FilePlan(path, size, whole.hexdigest(), part_size, tuple(parts))


def hash_part(path: Path, offset: int, size: int) -> str:
    """Return the sha256 in hex of `size` bytes of a file from `offset`, fewer where it ends before."""
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while size and (chunk := file.read(min(_CHUNK_SIZE, size))):
            found.update(chunk)
            size -= len(chunk)
    return found.hexdigest()
