"""Makes a backup while the platform runs: one moment of the database first, then every artifact that it names.

A row names only artifacts that were durable before it, so all of them are there, unless the platform purged one
meanwhile: then the newest database names it no more, and the copy begins again from that one. Uploads on their way are
in the platform's folder only; a restore finds them as after a crash.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from loraplex.backup.copying import Watcher, copy_database, copy_file, describe_file, write_file
from loraplex.backup.errors import BackupError, NotWholeError
from loraplex.backup.manifest import (
    BASES,
    DATABASE,
    MANIFEST,
    OBJECTS,
    SECRETS,
    BackupFile,
    BackupManifest,
    encode_manifest,
    seal,
)
from loraplex.backup.source import SECRET_FILES, Source
from loraplex.backup.staging import check_room, staged
from loraplex.backup.verify import find_faults
from loraplex.supervisor.base import PulledBase
from loraplex.version import __version__
from loraplex_registry.app import Inventory, list_files, open_inventory
from loraplex_registry.wire.digest import artifact_path
from loraplex_registry.wire.fault import Fault, NamedArtifact, NamedBase

_MAX_TRIES = 5
_ARTIFACT_MANIFEST = "manifest.json"


def create(
    source: Source, to: Path, watcher: Watcher, *, with_secrets: bool = True, with_base: bool = False
) -> BackupManifest:
    """Make a backup of the platform at `source` as a new folder `to`, and verify it before it gets its name.

    What is damaged in the platform itself is left out and named in `damaged`: the rest is worth having.

    Raises:
        BackupError: It cannot be made; nothing is at `to`.
    """
    source.check_objects()
    database = source.database
    with staged(to) as folder:
        try:
            bases = _estimate(source, database, folder, with_base=with_base)
            moment, objects = _copy_moment(source, database, folder, watcher)
            files = [describe_file(folder, DATABASE), *objects.list_files()]
            files += _copy_secrets(source, folder) if with_secrets else []
            files += [file for base in bases for file in _copy_base(base, folder, watcher)]
        except OSError as error:
            raise BackupError(f"The backup cannot be made: {error}. Nothing is at {to}.") from error
        manifest = seal(
            BackupManifest(
                made_by=__version__,
                made_at=moment.made_at.isoformat(timespec="seconds").replace("+00:00", "Z"),
                revision=moment.revision,
                files=tuple(files),
                bases=tuple(moment.bases),
                num_artifacts=len(objects.digest_to_files),
                damaged=tuple(objects.damaged.values()),
            )
        )
        if faults := find_faults(folder, manifest, watcher):
            raise NotWholeError(faults)
        write_file(folder, MANIFEST, encode_manifest(manifest))
    return manifest


@dataclass(frozen=True)
class _Moment:
    """What the copied database says of itself."""

    made_at: datetime
    revision: str
    bases: list[NamedBase]


class _Objects:
    """The artifacts of a backup in the making; what was copied once is not copied again."""

    def __init__(self, folder: Path, watcher: Watcher) -> None:
        self._folder = folder
        self._watcher = watcher
        self.digest_to_files: dict[str, list[BackupFile]] = {}
        self.damaged: dict[str, Fault] = {}

    def copy_all(
        self, named: Inventory, artifacts: Sequence[NamedArtifact], is_named_now: Callable[[str], bool]
    ) -> bool:
        """Copy what is not here yet; False if the platform has purged some of it since."""
        for digest in self.digest_to_files.keys() - {artifact.digest for artifact in artifacts}:
            del self.digest_to_files[digest]
            shutil.rmtree(self._folder / OBJECTS / artifact_path(digest))
        self.damaged.clear()
        for artifact in artifacts:
            if artifact.digest in self.digest_to_files:
                continue
            found = self._copy(named, artifact)
            if isinstance(found, list):
                self.digest_to_files[artifact.digest] = found
            elif is_named_now(artifact.digest):
                self.damaged[artifact.digest] = found
            else:
                return False
        return True

    def list_files(self) -> list[BackupFile]:
        """Return every file that was copied."""
        return [file for files in self.digest_to_files.values() for file in files]

    def _copy(self, named: Inventory, artifact: NamedArtifact) -> list[BackupFile] | Fault:
        """Copy an artifact and return its files, or why it cannot be served: then nothing of it stays here."""
        faults = named.find_faults(artifact)
        if faults:
            return faults[0]
        place = f"{OBJECTS}/{artifact_path(artifact.digest)}"
        manifest = named.find_manifest(artifact.digest)
        wanted = [] if manifest is None else list_files(artifact, manifest)
        sizes = {file.place: file.size for file in wanted} | {_ARTIFACT_MANIFEST: 0}
        try:
            with named.hold(artifact.digest, sizes) as paths:
                return [
                    copy_file(paths[name], self._folder, f"{place}/{name}", self._watcher.advance) for name in sizes
                ]
        except (OSError, KeyError) as error:
            shutil.rmtree(self._folder / place, ignore_errors=True)
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise
            return Fault("missing", artifact.digest, f"{artifact.names[0]}: it went while it was copied")


def _estimate(source: Source, database: Path, folder: Path, *, with_base: bool) -> list[PulledBase]:
    """Check the room for everything before a byte is copied, and return the bases to copy."""
    with open_inventory(source.database_url, source.object_store_url) as live:
        bases = source.find_bases(live.list_bases()) if with_base else []
        size = sum(file.size for artifact in live.list_artifacts() for file in artifact.files)
    size += database.stat().st_size + sum(path.stat().st_size for base in bases for path in _list_base(base))
    check_room(folder, size)
    return bases


def _copy_moment(source: Source, database: Path, folder: Path, watcher: Watcher) -> tuple[_Moment, _Objects]:
    objects, copy = _Objects(folder, watcher), folder / DATABASE
    for _ in range(_MAX_TRIES):
        watcher.begin("Copying the database", None)
        copy.unlink(missing_ok=True)
        made_at = datetime.now(UTC)
        copy_database(database, copy)
        with (
            open_inventory(f"sqlite:///{copy}", source.object_store_url, is_still=True) as named,
            open_inventory(source.database_url, source.object_store_url) as live,
        ):
            artifacts = named.list_artifacts()
            watcher.begin("Copying adapters", sum(file.size for artifact in artifacts for file in artifact.files))
            if objects.copy_all(named, artifacts, live.is_named):
                return _Moment(made_at, named.find_revision(), named.list_bases()), objects
    raise BackupError("The platform purged adapters all the time; try again when its sweep is over.")


def _copy_secrets(source: Source, folder: Path) -> list[BackupFile]:
    there = [name for name in SECRET_FILES if (source.folder.path / name).is_file()]
    return [
        copy_file((source.folder.path / name).resolve(), folder, f"{SECRETS}/{name}", lambda _: None) for name in there
    ]


def _list_base(base: PulledBase) -> list[Path]:
    return sorted(path for path in base.folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _copy_base(base: PulledBase, folder: Path, watcher: Watcher) -> list[BackupFile]:
    """Copy a base with the weights that it may only refer to."""
    paths = _list_base(base)
    watcher.begin(f"Copying the base {base.spec.name}", sum(path.stat().st_size for path in paths))
    return [
        copy_file(path.resolve(), folder, f"{BASES}/{base.spec.name}/{path.name}", watcher.advance) for path in paths
    ]
