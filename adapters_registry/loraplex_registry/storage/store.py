"""The protocol of object stores, and how one is chosen by its URL.

An artifact lies at `sha256/ab/cd/<hex>/`: `files/NAME` as first uploaded, `manifest.json` last; `extra/<sha256>` holds
files of later uploads of the same digest that differ (a README is outside the digest), so that everyone gets back
what they sent and nobody what another tenant sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from loraplex_registry.errors import SettingError
from loraplex_registry.storage.folder import FolderStore
from loraplex_registry.wire.adapter import Manifest


class ObjectStore(Protocol):
    """A store of artifacts. All methods block: call them from a thread."""

    def put(self, manifest: Manifest, files: Mapping[str, Path]) -> dict[str, str]:
        """Store an artifact durably; one that is there already stays, and what differs is added beside it.

        Mutates; safe against itself at once from several processes. The files given stay where they are.

        Returns:
            Where each file lies inside the artifact: name to `files/NAME` or `extra/<sha256>`.

        Raises:
            StoreUnavailableError: The store cannot take it.
        """

    def find_manifest(self, digest: str) -> Manifest | None:
        """Return the manifest of a whole artifact, or None; changes nothing."""

    def open(self, digest: str, place: str) -> BinaryIO:
        """Open one file of an artifact, at a place that `put` returned; it stays readable if deleted meanwhile.

        Raises:
            ArtifactMissingError: There is no such file.
            StoreUnavailableError: The store cannot be read.
        """

    def delete(self, digest: str) -> None:
        """Take an artifact away if it is there, without waiting for its bytes: `sweep_staging` frees those."""

    def list_artifacts(self) -> Iterator[tuple[str, float]]:
        """Yield digest and age in seconds since it was last put, of every artifact there is."""

    def find_age_s(self, digest: str) -> float | None:
        """Return the seconds since an artifact was last put, None if it is not there."""

    def create_staging(self) -> Path:
        """Create an empty private folder on the store's file system; the caller removes it."""

    def sweep_staging(self, min_age_s: float) -> int:
        """Remove staging and half-made artifacts not written to for `min_age_s`, and return how many."""


def create_store(url: str) -> ObjectStore:
    """Return the store that `url` names, made ready for use.

    Raises:
        SettingError: It is no file:///FOLDER, or the folder cannot be made.
    """
    parts = urlsplit(url)
    if parts.scheme == "s3":
        raise SettingError("LORAPLEX_OBJECT_STORE_URL: s3:// is not supported yet; use file:///FOLDER")
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise SettingError("LORAPLEX_OBJECT_STORE_URL must be file:///FOLDER")
    try:
        return FolderStore(Path(unquote(parts.path)))
    except OSError as error:
        raise SettingError(f"LORAPLEX_OBJECT_STORE_URL: {error}") from error
