"""The protocol of object stores, and how one is chosen by its URL.

An artifact lies at `sha256/ab/cd/<hex>/`: `files/NAME` as first uploaded, `manifest.json` last; `extra/<sha256>` holds
files of later uploads of the same digest that differ (a README is outside the digest), so that everyone gets back
what they sent and nobody what another tenant sent.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from loraplex_registry.errors import SettingError
from loraplex_registry.storage.folder import FolderStore
from loraplex_registry.storage.part import Part, PartPlace, SignedPart
from loraplex_registry.wire.adapter import Manifest

__all__ = ["ObjectStore", "Part", "PartPlace", "PartStore", "SignedPart", "Store", "create_store"]


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

    def close(self) -> None:
        """Close connections; nobody uses the store afterwards."""


class PartStore(Protocol):
    """Parts of large uploads, by the upload's id. All methods block: call them from a thread.

    Only whole parts are there: one that was cut, or whose bytes have another sha256, is not. A part that is sent again
    replaces its twin.
    """

    def sign(self, upload: str, part: Part, life_s: int) -> SignedPart | None:
        """Return how to send `part` to the store itself; None where parts go through the registry (`write`)."""

    def write(self, upload: str, part: Part, source: Path) -> None:
        """Keep a whole part, from a file on the disk of `create_staging`.

        Raises:
            InvalidRequestError: The bytes are not those that were announced.
            StoreUnavailableError: The store cannot take it.
        """

    def list(self, upload: str) -> dict[PartPlace, int]:
        """Return the size in bytes of every whole part that is there."""

    def join(self, upload: str, parts: Sequence[Part], to: Path) -> str:
        """Write the bytes of `parts`, one behind another, to a new file `to` and return their sha256 in hex.

        Raises:
            ArtifactMissingError: A part is not there, or is not what it should be.
            StoreUnavailableError: The store cannot be read.
        """

    def drop(self, upload: str) -> None:
        """Remove all parts of an upload; fine if there are none."""

    def list_uploads(self) -> Iterator[tuple[str, float]]:
        """Yield every upload that has parts, and the seconds since its newest was written."""


class Store(ObjectStore, PartStore, Protocol):
    """Artifacts and the parts of uploads that become artifacts."""


def create_store(url: str, scratch: Path | None = None, public_url: str | None = None) -> Store:
    """Return the store that `url` names, made ready for use; one on S3 is not asked anything yet.

    Args:
        url: file:///FOLDER or s3://BUCKET/PREFIX?endpoint=... (see `s3_address`).
        scratch: Folder for uploads on their way to S3; default one in the system's temporary folder.
        public_url: The host in presigned URLs of S3.

    Raises:
        SettingError: It is neither, or a folder cannot be made.
    """
    parts = urlsplit(url)
    try:
        if parts.scheme == "s3":
            return _create_s3(url, scratch, public_url)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
            raise SettingError("LORAPLEX_OBJECT_STORE_URL must be file:///FOLDER or s3://BUCKET/PREFIX?endpoint=...")
        if public_url is not None:
            raise SettingError("LORAPLEX_OBJECT_STORE_PUBLIC_URL is for s3:// stores; unset it")
        return FolderStore(Path(unquote(parts.path)))
    except OSError as error:
        raise SettingError(f"LORAPLEX_OBJECT_STORE_URL: {error}") from error


def _create_s3(url: str, scratch: Path | None, public_url: str | None) -> Store:
    # boto3 takes 0.2 s to import
    from loraplex_registry.storage.s3 import S3Store
    from loraplex_registry.storage.s3_address import parse_address

    address = parse_address(url, public_url)
    return S3Store(address, scratch or Path(tempfile.gettempdir()) / f"loraplex-scratch-{os.getuid()}")
