"""Parts of large uploads in memory: the twin of `folder_parts` for tests."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from loraplex_registry.errors import ArtifactMissingError, InvalidRequestError
from loraplex_registry.storage.joining import copy_parts
from loraplex_registry.storage.part import Part, PartPlace, SignedPart


class MemoryParts:
    """Parts in a dictionary."""

    def __init__(self) -> None:
        self._upload_to_parts: dict[str, dict[PartPlace, bytes]] = {}
        self._upload_to_written_at: dict[str, float] = {}

    def sign(self, upload: str, part: Part, life_s: int) -> SignedPart | None:  # noqa: ARG002 - of the protocol
        """Return None: parts go through the registry."""
        return None

    def write(self, upload: str, part: Part, source: Path) -> None:
        """Keep a whole part (see `PartStore.write`)."""
        content = source.read_bytes()
        if (len(content), hashlib.sha256(content).hexdigest()) != (part.size, part.sha256):
            raise InvalidRequestError("The bytes of this part are not those that were announced")
        self._upload_to_parts.setdefault(upload, {})[part.place] = content
        self._upload_to_written_at[upload] = time.time()

    def list(self, upload: str) -> dict[PartPlace, int]:
        """Return the sizes of the parts that are there (see `PartStore.list`)."""
        return {place: len(content) for place, content in self._upload_to_parts.get(upload, {}).items()}

    def join(self, upload: str, parts: Sequence[Part], to: Path) -> str:
        """Write `parts` to one file (see `PartStore.join`)."""
        contents = self._upload_to_parts.get(upload, {})
        try:
            return copy_parts(parts, lambda part: io.BytesIO(contents[part.place]), to)
        except KeyError as error:
            raise ArtifactMissingError(f"A part of {upload} is not there") from error

    def drop(self, upload: str) -> None:
        """Remove all parts of an upload (see `PartStore.drop`)."""
        self._upload_to_parts.pop(upload, None)

    def list_uploads(self) -> Iterator[tuple[str, float]]:
        """Yield every upload that has parts, and its age (see `PartStore.list_uploads`)."""
        for upload in sorted(self._upload_to_parts):
            yield upload, time.time() - self._upload_to_written_at[upload]
