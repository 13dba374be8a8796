"""Files and folders on a disk that must outlive a power cut: links, copies, fsync, age, digest."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from pathlib import Path

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `source` durable under `target`: a second link where the file system allows it, else a private copy."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        target.chmod(0o600)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def write_new(path: Path, content: bytes) -> None:
    """Write a new private file, durable once this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, no path
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def fsync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def idle_s(path: Path) -> float:
    """Return the seconds since anything at `path` was last written: a slow upload keeps its staging young."""
    try:
        inside = list(path.iterdir()) if path.is_dir() else []
        return time.time() - max(each.stat().st_mtime for each in (path, *inside))
    except FileNotFoundError:
        return 0.0


def hash_file(path: Path) -> str:
    """Return the sha256 of a file in hex, read a piece at a time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
