"""Object store in memory: the folder store's twin for tests. Staging is a temporary folder on disk."""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from loraplex_registry.errors import ArtifactMissingError
from loraplex_registry.storage.memory_parts import MemoryParts
from loraplex_registry.storage.scratch import Scratch
from loraplex_registry.wire.adapter import Manifest, ManifestFile


@dataclass
class _Artifact:
    manifest: Manifest
    place_to_bytes: dict[str, bytes]
    put_at: float = field(default_factory=time.time)


class MemoryStore(MemoryParts):
    """Artifacts in a dictionary; `close` removes the staging folder."""

    def __init__(self) -> None:
        super().__init__()
        self._artifacts: dict[str, _Artifact] = {}
        self._staging = tempfile.TemporaryDirectory(prefix="loraplex-staging-")
        self._scratch = Scratch(Path(self._staging.name))

    def close(self) -> None:
        """Remove all staging."""
        self._staging.cleanup()

    def put(self, manifest: Manifest, files: Mapping[str, Path]) -> dict[str, str]:
        """Store an artifact (see `ObjectStore.put`)."""
        contents = {file.name: files[file.name].read_bytes() for file in manifest.files}
        artifact = self._artifacts.setdefault(
            manifest.digest, _Artifact(manifest, {f"files/{name}": content for name, content in contents.items()})
        )
        artifact.put_at = time.time()
        return {file.name: _place(artifact, file, contents[file.name]) for file in manifest.files}

    def find_manifest(self, digest: str) -> Manifest | None:
        """Return the manifest, or None."""
        artifact = self._artifacts.get(digest)
        return artifact.manifest if artifact else None

    def open(self, digest: str, place: str) -> BinaryIO:
        """Open one file of an artifact."""
        artifact = self._artifacts.get(digest)
        if artifact is None or place not in artifact.place_to_bytes:
            raise ArtifactMissingError(f"{digest} has no {place}")
        return io.BytesIO(artifact.place_to_bytes[place])

    def delete(self, digest: str) -> None:
        """Remove an artifact if it is there."""
        self._artifacts.pop(digest, None)

    def list_artifacts(self) -> Iterator[tuple[str, float]]:
        """Yield digest and age of every artifact."""
        yield from [(digest, time.time() - artifact.put_at) for digest, artifact in sorted(self._artifacts.items())]

    def find_age_s(self, digest: str) -> float | None:
        """Return the seconds since an artifact was last put."""
        artifact = self._artifacts.get(digest)
        return time.time() - artifact.put_at if artifact else None

    def create_staging(self) -> Path:
        """Create an empty folder for one upload."""
        return self._scratch.create()

    def sweep_staging(self, min_age_s: float) -> int:
        """Remove what uploads left."""
        return self._scratch.sweep(min_age_s)


def _place(artifact: _Artifact, file: ManifestFile, content: bytes) -> str:
    if file in artifact.manifest.files:
        return f"files/{file.name}"
    artifact.place_to_bytes.setdefault(f"extra/{file.sha256}", content)
    return f"extra/{file.sha256}"
