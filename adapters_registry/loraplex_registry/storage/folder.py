"""Object store in a folder.

Everything is made under a temporary name, fsynced and renamed, so that what has its final name is whole. Folders are
0700 and files 0600. Several processes may share the folder.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from loraplex_registry.errors import ArtifactMissingError, StoreUnavailableError
from loraplex_registry.peft.unreadable import UNREADABLE
from loraplex_registry.storage.failure import unavailable_on_failure
from loraplex_registry.storage.file import fsync_folder, hash_file, idle_s, link_or_copy, write_new
from loraplex_registry.storage.folder_parts import FolderParts
from loraplex_registry.wire.adapter import Manifest, ManifestFile
from loraplex_registry.wire.digest import artifact_path
from loraplex_registry.wire.ids import new_uuid

_MANIFEST = "manifest.json"
_log = logging.getLogger(__name__)


class FolderStore(FolderParts):
    """Artifacts below `root`; `staging/`, `receiving/` and `tmp/` beside them, on the same file system."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        for folder in (root / "sha256", root / "receiving"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, manifest: Manifest, files: Mapping[str, Path]) -> dict[str, str]:
        """Store an artifact (see `ObjectStore.put`)."""
        folder = self.root / artifact_path(manifest.digest)
        with unavailable_on_failure():
            stored = self.find_manifest(manifest.digest)
            if stored is None:
                self._create(folder, manifest, files)
                stored = self.find_manifest(manifest.digest)
            else:
                self._heal(folder, stored, manifest, files)
            if stored is None:
                raise StoreUnavailableError(f"{manifest.digest} cannot be kept: its files vanish")
            # The sweeper judges an artifact's age by this.
            os.utime(folder)
            return {file.name: self._place(folder, stored, file, files[file.name]) for file in manifest.files}

    def find_manifest(self, digest: str) -> Manifest | None:
        """Return the manifest if it and all files it names are there at their sizes."""
        folder = self.root / artifact_path(digest)
        try:
            manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
            sizes = {file.name: (folder / "files" / file.name).stat().st_size for file in manifest.files}
        except (FileNotFoundError, *UNREADABLE):
            return None
        except OSError as error:
            raise StoreUnavailableError from error
        is_whole = manifest.digest == digest and all(sizes[file.name] == file.size for file in manifest.files)
        return manifest if is_whole else None

    def open(self, digest: str, place: str) -> BinaryIO:
        """Open one file of an artifact."""
        try:
            return (self.root / artifact_path(digest) / place).open("rb")
        except FileNotFoundError as error:
            raise ArtifactMissingError(f"{digest} has no {place}") from error
        except OSError as error:
            raise StoreUnavailableError from error

    def delete(self, digest: str) -> None:
        """Move an artifact to where `sweep_staging` finds it; readers that have it open keep it."""
        with unavailable_on_failure():
            self._move_away(self.root / artifact_path(digest))

    def list_artifacts(self) -> Iterator[tuple[str, float]]:
        """Yield digest and age of every artifact, whole or not."""
        for folder in sorted(self.root.glob("sha256/??/??/*")):
            digest = f"sha256:{folder.name}"
            age_s = self.find_age_s(digest)
            if age_s is not None:
                yield digest, age_s

    def find_age_s(self, digest: str) -> float | None:
        """Return the seconds since an artifact was last put."""
        try:
            return time.time() - (self.root / artifact_path(digest)).stat().st_mtime
        except FileNotFoundError:
            return None

    def create_staging(self) -> Path:
        """Create an empty folder for one upload."""
        folder = self.root / "receiving" / new_uuid().hex
        with unavailable_on_failure():
            folder.mkdir(mode=0o700)
        return folder

    def close(self) -> None:
        """Do nothing: a folder holds no connections."""

    def sweep_staging(self, min_age_s: float) -> int:
        """Remove what uploads and interrupted writes left."""
        old = [
            folder
            for parent in ("receiving", "tmp")
            for folder in (self.root / parent).iterdir()
            if idle_s(folder) > min_age_s
        ]
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)
        return len(old)

    def _create(self, folder: Path, manifest: Manifest, files: Mapping[str, Path]) -> None:
        """Make the artifact under a temporary name and give it its own, unless another did so first."""
        made = self.root / "tmp" / new_uuid().hex
        try:
            self._make(made, manifest, files)
            self._mkdirs(folder.parent)
            self._rename_or_keep(made, folder, manifest.digest)
            fsync_folder(folder.parent)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _make(self, made: Path, manifest: Manifest, files: Mapping[str, Path]) -> None:
        (made / "files").mkdir(mode=0o700, parents=True)
        made.chmod(0o700)
        for file in manifest.files:
            link_or_copy(files[file.name], made / "files" / file.name)
        fsync_folder(made / "files")
        write_new(made / _MANIFEST, msgspec.json.encode(manifest))
        fsync_folder(made)

    def _rename_or_keep(self, made: Path, folder: Path, digest: str) -> None:
        try:
            made.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if self.find_manifest(digest) is None:
                # Damaged from outside: no row can be served from it, a whole copy heals it.
                self._move_away(folder)
                made.rename(folder)

    def _place(self, folder: Path, stored: Manifest, file: ManifestFile, source: Path) -> str:
        if file in stored.files:
            return f"files/{file.name}"
        extra = folder / "extra" / file.sha256
        if not extra.exists():
            extra.parent.mkdir(mode=0o700, exist_ok=True)
            self._replace(extra, source)
            fsync_folder(folder)
        return f"extra/{file.sha256}"

    def _heal(self, folder: Path, stored: Manifest, manifest: Manifest, files: Mapping[str, Path]) -> None:
        """Put back what has rotted since it was stored: here are the same bytes again."""
        for file in set(stored.files) & set(manifest.files):
            kept = folder / "files" / file.name
            if hash_file(kept) != file.sha256:
                _log.warning("%s of %s was damaged and is put back", file.name, stored.digest)
                self._replace(kept, files[file.name])

    def _replace(self, target: Path, source: Path) -> None:
        """Make `target` a durable copy of `source` at once; readers that have the old one open keep it."""
        temporary = self.root / "tmp" / new_uuid().hex
        try:
            link_or_copy(source, temporary)
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_folder(target.parent)

    def _mkdirs(self, folder: Path) -> None:
        """Create the two levels above an artifact, each entry durable."""
        for level in (folder.parent, folder):
            level.mkdir(mode=0o700, exist_ok=True)
            fsync_folder(level.parent)

    def _move_away(self, folder: Path) -> None:
        try:
            folder.rename(self.root / "tmp" / new_uuid().hex)
        except FileNotFoundError:
            return
        fsync_folder(folder.parent)
