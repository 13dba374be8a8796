"""Makes one file of the parts of an upload and checks each part on its way."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from loraplex_registry.errors import ArtifactMissingError
from loraplex_registry.storage.part import Part

_PIECE_BYTES = 1 << 20


def copy_parts(parts: Sequence[Part], open_part: Callable[[Part], BinaryIO], to: Path) -> str:
    """Write `parts`, one behind another, to a new private file `to` and return its sha256 in hex.

    Raises:
        ArtifactMissingError: The bytes of a part are not what they should be.
    """
    whole = hashlib.sha256()
    descriptor = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb", buffering=0) as target:  # noqa: PTH123 - a descriptor, no path
        for part in parts:
            with open_part(part) as source:
                _copy(source, part, target, whole)
    return whole.hexdigest()


def check_part(part: Part, size: int, sha256: str) -> None:
    """Compare a part with what was announced.

    Raises:
        ArtifactMissingError: They differ.
    """
    if (size, sha256) != (part.size, part.sha256):
        file, number = part.place
        raise ArtifactMissingError(f"Part {number} of file {file} is not what was announced; send it again")


def _copy(source: BinaryIO, part: Part, target: BinaryIO, whole: hashlib._Hash) -> None:
    own, size = hashlib.sha256(), 0
    while piece := source.read(_PIECE_BYTES):
        own.update(piece)
        whole.update(piece)
        target.write(piece)
        size += len(piece)
    check_part(part, size, own.hexdigest())
