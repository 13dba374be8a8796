"""Parts of large uploads in a folder: `staging/<upload>/<file>.<number>`, each whole or not there.

The registry writes them, under a temporary name first; other processes may read and write the same folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from loraplex_registry.errors import ArtifactMissingError, InvalidRequestError
from loraplex_registry.storage.failure import unavailable_on_failure
from loraplex_registry.storage.file import fsync_folder, hash_file, idle_s, link_or_copy
from loraplex_registry.storage.joining import copy_parts
from loraplex_registry.storage.part import Part, PartPlace, SignedPart
from loraplex_registry.wire.ids import new_uuid


class FolderParts:
    """The parts below `root/staging`; `root/tmp` holds what is on its way there and away."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in (root, root / "staging", root / "tmp"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def sign(self, upload: str, part: Part, life_s: int) -> SignedPart | None:  # noqa: ARG002 - of the protocol
        """Return None: parts go through the registry."""
        return None

    def write(self, upload: str, part: Part, source: Path) -> None:
        """Keep a whole part (see `PartStore.write`)."""
        with unavailable_on_failure():
            if (source.stat().st_size, hash_file(source)) != (part.size, part.sha256):
                raise InvalidRequestError("The bytes of this part are not those that were announced")
            made = self.root / "tmp" / new_uuid().hex
            folder = self._folder(upload)
            try:
                link_or_copy(source, made)
                made.chmod(0o600)
                folder.mkdir(mode=0o700, exist_ok=True)
                made.rename(folder / _name(part.place))
            finally:
                made.unlink(missing_ok=True)
            fsync_folder(folder)
            fsync_folder(folder.parent)

    def list(self, upload: str) -> dict[PartPlace, int]:
        """Return the sizes of the parts that are there (see `PartStore.list`)."""
        try:
            with unavailable_on_failure(missing_is=FileNotFoundError):
                return {_place(path.name): path.stat().st_size for path in self._folder(upload).iterdir()}
        except FileNotFoundError:
            return {}

    def join(self, upload: str, parts: Sequence[Part], to: Path) -> str:
        """Write `parts` to one file (see `PartStore.join`)."""
        folder = self._folder(upload)
        try:
            with unavailable_on_failure(missing_is=FileNotFoundError):
                return copy_parts(parts, lambda part: (folder / _name(part.place)).open("rb"), to)
        except FileNotFoundError as error:
            raise ArtifactMissingError(f"A part of {upload} is not there") from error

    def drop(self, upload: str) -> None:
        """Remove all parts of an upload (see `PartStore.drop`)."""
        gone = self.root / "tmp" / new_uuid().hex
        try:
            with unavailable_on_failure(missing_is=FileNotFoundError):
                self._folder(upload).rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)

    def list_uploads(self) -> Iterator[tuple[str, float]]:
        """Yield every upload that has parts, and its age (see `PartStore.list_uploads`)."""
        for folder in sorted((self.root / "staging").iterdir()):
            yield folder.name, idle_s(folder)

    def _folder(self, upload: str) -> Path:
        assert upload.replace("_", "").isalnum(), "an id of ours"
        return self.root / "staging" / upload


def _name(place: PartPlace) -> str:
    return f"{place.file}.{place.number}"


def _place(name: str) -> PartPlace:
    file, _, number = name.partition(".")
    return PartPlace(int(file), int(number))
