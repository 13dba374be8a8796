"""Makes a data folder from a backup: verified first, made beside its place, upgraded, renamed."""

from __future__ import annotations

from pathlib import Path

from loraplex.backup.copying import Watcher, copy_file
from loraplex.backup.errors import BackupError, NotWholeError
from loraplex.backup.manifest import DATABASE, SECRETS, BackupFile, BackupManifest
from loraplex.backup.staging import check_free, check_room, staged
from loraplex.backup.verify import verify
from loraplex_registry.app import upgrade


def restore(folder: Path, to: Path, watcher: Watcher) -> BackupManifest:
    """Make the data folder `to` from the backup in `folder`; an older database is upgraded on its way.

    A newer one that serves this program stays as it is.

    Raises:
        BackupError: `to` is not free, the backup is not whole or a newer program made it, or the disk is full; nothing
            was made.
    """
    check_free(to)
    manifest, faults = verify(folder, watcher)
    if faults:
        raise NotWholeError(faults)
    database = next(file for file in manifest.files if file.path == DATABASE)
    with staged(to) as made:
        # an upgrade copies the database before it changes it
        check_room(made, manifest.size_bytes + database.size)
        watcher.begin("Restoring", manifest.size_bytes)
        try:
            for file in manifest.files:
                _copy(folder, made, file, watcher)
        except OSError as error:
            raise BackupError(f"It cannot be restored: {error}. Nothing is at {to}.") from error
        watcher.begin("Upgrading the database", None)
        _upgrade(made / DATABASE)
    return manifest


def _copy(folder: Path, made: Path, file: BackupFile, watcher: Watcher) -> None:
    place = file.path.removeprefix(f"{SECRETS}/")
    copied = copy_file(folder / file.path, made, place, watcher.advance)
    if (copied.size, copied.sha256) != (file.size, file.sha256):
        raise BackupError(f"{folder / file.path} changed while it was read. Nothing was restored; try again.")


def _upgrade(database: Path) -> None:
    done = upgrade(f"sqlite+aiosqlite:///{database}")
    for left in (done.copy, database.with_name(f"{database.name}.lock")):
        if left is not None:
            left.unlink(missing_ok=True)
