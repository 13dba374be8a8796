"""A folder that is made beside its place and gets its name only once it is whole and on the disk.

A process that is killed leaves `.NAME.partial-*`, which nobody takes for NAME; the next one for that place removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loraplex.backup.errors import BackupError

_LOCK = ".lock"


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield an empty private folder that becomes `target` at the end of the block; after an error nothing is left.

    Raises:
        BackupError: `target` is there and not an empty folder, or it cannot be made.
    """
    check_free(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        folder = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise BackupError(f"{target} cannot be made ({error.strerror}); choose another place.") from error
    try:
        with (folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
            (folder / _LOCK).unlink()
            _publish(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_free(target: Path) -> None:
    """Return if nothing is at `target`, or an empty folder.

    Raises:
        BackupError: There is something.
    """
    try:
        inside = next(target.iterdir(), None)
    except FileNotFoundError:
        return
    except OSError as error:
        raise BackupError(f"{target} is no folder that can be used ({error.strerror}); choose another one.") from error
    if inside is not None:
        raise BackupError(f"{target} is not empty ({inside.name} is in it); choose another folder.")


def check_room(folder: Path, needed_bytes: int) -> None:
    """Return if `needed_bytes` fit on the disk of `folder`, with a little to spare.

    Raises:
        BackupError: They do not.
    """
    free = shutil.disk_usage(folder).free
    wanted = needed_bytes + needed_bytes // 50 + (16 << 20)
    if free < wanted:
        raise BackupError(
            f"{folder.parent} has {free >> 20:,} MiB free and {wanted >> 20:,} MiB are needed; free some, or choose "
            "another disk. Nothing was made."
        )


def fsync_tree(folder: Path) -> None:
    """Make the entries of a folder and of all below it durable; files are so already."""
    for place, _, _ in os.walk(folder):
        _fsync(Path(place))


def _publish(folder: Path, target: Path) -> None:
    fsync_tree(folder)
    try:
        # onto an empty folder, too
        folder.rename(target)
    except OSError as error:
        raise BackupError(f"{target} came to be meanwhile ({error.strerror}); choose another place.") from error
    _fsync(target.parent)


def _sweep(target: Path) -> None:
    """Remove what processes left that were killed; those that run hold their lock."""
    for left in target.parent.glob(f".{target.name}.partial-*"):
        with contextlib.suppress(OSError), (left / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
