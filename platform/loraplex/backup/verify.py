"""Whether a backup is whole: every file by its sha256, the database by its own rules, every adapter by its digest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from loraplex.backup.copying import Watcher, hash_file
from loraplex.backup.errors import NewerError
from loraplex.backup.manifest import DATABASE, MANIFEST, OBJECTS, BackupFile, BackupManifest, read_manifest
from loraplex_registry.app import Inventory, RegistryError, head, knows_revision, open_inventory
from loraplex_registry.wire.digest import DIGEST_LEN
from loraplex_registry.wire.fault import Fault, NamedArtifact

_MAX_DEPTH = 8


@dataclass(frozen=True)
class Audit:
    """What was found in a database and its store that may be in use."""

    faults: list[Fault]
    revision: str
    num_artifacts: int
    num_orphans: int


def verify(folder: Path, watcher: Watcher) -> tuple[BackupManifest, list[Fault]]:
    """Look at every byte of the backup in `folder` and return what it says of itself and what is wrong with it.

    Raises:
        BackupError: It is no backup, or its manifest is damaged.
        NewerError: A newer program made it, or its database was ahead and did not serve this program any more.
    """
    manifest = read_manifest(folder)
    if not (knows_revision(manifest.revision) or _serves_this_program(folder, manifest.revision)):
        raise NewerError(
            f"The backup's database is at revision {manifest.revision}, which this program does not know: Loraplex "
            f"{manifest.made_by} made it. Use that one, or a newer one."
        )
    return manifest, find_faults(folder, manifest, watcher)


def find_faults(folder: Path, manifest: BackupManifest, watcher: Watcher) -> list[Fault]:
    """Return what is not as `manifest` says, or is no adapter of its digest; nothing of it is written to."""
    watcher.begin("Verifying files", manifest.size_bytes)
    faults = list(_compare_files(folder, manifest, watcher))
    if faults:
        # the rest would say the same again
        return faults
    try:
        with _open(folder) as inside:
            return _compare_rows(inside, manifest, watcher)
    except RegistryError as error:
        return [Fault("database", DATABASE, error.message)]


@contextmanager
def _open(folder: Path) -> Iterator[Inventory]:
    database, objects = folder.absolute() / DATABASE, quote(str(folder.absolute() / OBJECTS))
    with open_inventory(f"sqlite:///{database}", f"file://{objects}", is_still=True) as inside:
        yield inside


def _serves_this_program(folder: Path, revision: str) -> bool:
    """Whether releases ran side by side: the next one had upgraded the database when this one made the backup."""
    try:
        with _open(folder) as inside:
            return inside.find_revision() == revision and inside.serves(head())
    except RegistryError:
        return False


def audit(database_url: str, object_store_url: str, scratch: Path | None, watcher: Watcher) -> Audit:
    """Compare a database with its store, byte by byte, while both may be in use; reads only.

    Raises:
        RegistryError: One of them does not answer.
    """
    with open_inventory(database_url, object_store_url, scratch) as inventory:
        revision = inventory.find_revision()
        faults = inventory.find_database_faults()
        artifacts = inventory.list_artifacts()
        watcher.begin("Verifying adapters", _size_of(artifacts))
        for artifact in artifacts:
            # what was purged since the list was made is nobody's any more
            if (found := inventory.find_faults(artifact)) and inventory.is_named(artifact.digest):
                faults += found
            watcher.advance(_size_of([artifact]))
        return Audit(faults, revision, len(artifacts), inventory.find_orphans())


def _compare_rows(inside: Inventory, manifest: BackupManifest, watcher: Watcher) -> list[Fault]:
    faults = inside.find_database_faults()
    if faults:
        return faults
    revision = inside.find_revision()
    if revision != manifest.revision:
        faults.append(Fault("manifest", DATABASE, f"it is at revision {revision}, not {manifest.revision}"))
    damaged = {fault.subject[:DIGEST_LEN] for fault in manifest.damaged}
    artifacts = [artifact for artifact in inside.list_artifacts() if artifact.digest not in damaged]
    watcher.begin("Verifying adapters", _size_of(artifacts))
    for artifact in artifacts:
        faults += inside.find_faults(artifact)
        watcher.advance(_size_of([artifact]))
    if inside.find_orphans() or len(artifacts) != manifest.num_artifacts:
        faults.append(Fault("extra", OBJECTS, "it holds adapters that the database does not name"))
    return faults


def _compare_files(folder: Path, manifest: BackupManifest, watcher: Watcher) -> Iterator[Fault]:
    wanted = {file.path: file for file in manifest.files}
    there = dict(_walk(folder))
    for path, entry in sorted(there.items()):
        if not entry.is_file(follow_symlinks=False):
            yield Fault("foreign", path, "it is a link or the like, which no backup holds")
        elif path not in wanted and path != MANIFEST:
            yield Fault("extra", path, "the manifest does not name it")
    for path, file in wanted.items():
        if path not in there:
            yield Fault("missing", path, "it is not there")
        elif there[path].is_file(follow_symlinks=False):
            yield from _compare_file(folder, file, there[path].stat(follow_symlinks=False).st_size, watcher)


def _compare_file(folder: Path, file: BackupFile, size: int, watcher: Watcher) -> Iterator[Fault]:
    if size != file.size:
        yield Fault("truncated" if size < file.size else "rotted", file.path, f"{size} bytes, not {file.size}")
        return
    try:
        found = hash_file(folder / file.path, watcher.advance)
    except OSError as error:
        yield Fault("rotted", file.path, f"it cannot be read: {error.strerror}")
        return
    if found != file.sha256:
        yield Fault("rotted", file.path, "its sha256 is another one")


def _walk(folder: Path, below: str = "", depth: int = 0) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield everything that is no folder, by its path; links are not followed."""
    with os.scandir(folder / below) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        path = f"{below}{entry.name}"
        if entry.is_dir(follow_symlinks=False) and depth < _MAX_DEPTH:
            yield from _walk(folder, f"{path}/", depth + 1)
        elif path != ".lock":
            yield path, entry


def _size_of(artifacts: list[NamedArtifact]) -> int:
    return sum(file.size for artifact in artifacts for file in artifact.files)
