"""The private folder in which front and core meet, and the end of those that killed fronts have left.

Whoever holds the lock on a folder is alive: the kernel lets go of it however a process ends, and whatever namespace
its process id is from.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "lpx-core-"
# a younger one may be between its birth and its lock
_MIN_AGE_S = 60.0


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Provide an empty folder for this process, and remove it; before that, remove those of dead ones."""
    sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    descriptor = _open(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def sweep(parent: Path) -> None:
    """Remove our user's folders in `parent` that no process holds; whatever else is there stays."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    descriptor = _open(folder)
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.getuid() and time.time() - found.st_mtime > _MIN_AGE_S:
            # raises where the folder is held
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
