"""The artifacts of a store as files on disk, to be read: a folder's where they lie, a bucket's in a scratch folder."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from loraplex_registry.errors import ArtifactMissingError
from loraplex_registry.peft.unreadable import UNREADABLE
from loraplex_registry.storage.store import Store, create_store
from loraplex_registry.wire.adapter import Manifest
from loraplex_registry.wire.digest import artifact_path

MANIFEST_FILE = "manifest.json"
_MAX_MANIFEST_BYTES = 64 << 20


class Shelf(Protocol):
    """Artifacts that are only read."""

    def find_manifest(self, digest: str) -> Manifest | None:
        """Return the manifest, None if it is not there or is none of this digest."""

    def hold(self, digest: str, files: Mapping[str, int]) -> AbstractContextManager[dict[str, Path]]:
        """Have the files at these places until the end; what is not there is left out. Sizes are those expected."""

    def list_digests(self) -> Iterator[str]:
        """Yield every digest that the store has something of."""

    def close(self) -> None:
        """Close connections."""


class FolderShelf:
    """Artifacts below a folder; it is not written to, unlike by a `FolderStore`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_manifest(self, digest: str) -> Manifest | None:
        """See `Shelf`."""
        try:
            with (self._root / artifact_path(digest) / MANIFEST_FILE).open("rb") as file:
                manifest = msgspec.json.decode(file.read(_MAX_MANIFEST_BYTES), type=Manifest)
        except (OSError, *UNREADABLE):
            return None
        return manifest if manifest.digest == digest else None

    @contextlib.contextmanager
    def hold(self, digest: str, files: Mapping[str, int]) -> Iterator[dict[str, Path]]:
        """See `Shelf`."""
        folder = self._root / artifact_path(digest)
        yield {place: folder / place for place in files if (folder / place).is_file()}

    def list_digests(self) -> Iterator[str]:
        """See `Shelf`."""
        for folder in sorted(self._root.glob("sha256/??/??/*")):
            yield f"sha256:{folder.name}"

    def close(self) -> None:
        """Nothing is open."""


class StoreShelf:
    """Artifacts of any store, fetched one at a time."""

    def __init__(self, store: Store, scratch: Path | None) -> None:
        self._store = store
        self._scratch = scratch

    def find_manifest(self, digest: str) -> Manifest | None:
        """See `Shelf`."""
        return self._store.find_manifest(digest)

    @contextlib.contextmanager
    def hold(self, digest: str, files: Mapping[str, int]) -> Iterator[dict[str, Path]]:
        """See `Shelf`."""
        if self._scratch is not None:
            self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="loraplex-audit-", dir=self._scratch) as folder:
            paths = {place: Path(folder) / f"{i}" for i, place in enumerate(files)}
            yield {place: path for place, path in paths.items() if self._fetch(digest, place, path)}

    def list_digests(self) -> Iterator[str]:
        """See `Shelf`."""
        for digest, _ in self._store.list_artifacts():
            yield digest

    def close(self) -> None:
        """Close the store's connections."""
        self._store.close()

    def _fetch(self, digest: str, place: str, to: Path) -> bool:
        try:
            with self._store.open(digest, place) as source, to.open("xb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        except ArtifactMissingError:
            return False
        return True


def open_shelf(url: str, scratch: Path | None) -> Shelf:
    """Return the artifacts of the store that `url` names.

    Raises:
        SettingError: It names none.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return FolderShelf(Path(unquote(parts.path)))
    return StoreShelf(create_store(url, scratch), scratch)
