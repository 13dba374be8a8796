"""Copies of files and of a SQLite database, durable when they return, hashed on their way."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from loraplex.backup.errors import BackupError
from loraplex.backup.manifest import BackupFile

_PIECE_BYTES = 1 << 20
_PAGES = 2048


class Watcher(Protocol):
    """Is told how far a backup is."""

    def begin(self, what: str, total: int | None) -> None:
        """A stage begins that has `total` bytes, or nobody knows how many."""

    def advance(self, count: int) -> None:
        """So many bytes more are done."""


def copy_file(source: Path, folder: Path, path: str, on_bytes: Callable[[int], None]) -> BackupFile:
    """Copy a regular file to `path` below `folder`, private and durable, and say what it was.

    Raises:
        OSError: It cannot be read or written, or it is a link.
    """
    target = folder / path
    _make_private(target.parent)
    digest, size = hashlib.sha256(), 0
    with (
        os.fdopen(os.open(source, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as reader,
        os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as writer,
    ):
        while piece := reader.read(_PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
            _write_all(writer.fileno(), piece)
            on_bytes(len(piece))
        os.fsync(writer.fileno())
    return BackupFile(path, size, digest.hexdigest())


def write_file(folder: Path, path: str, content: bytes) -> BackupFile:
    """Write a new private file below `folder`, durable when this returns."""
    target = folder / path
    _make_private(target.parent)
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as writer:
        _write_all(writer.fileno(), content)
        os.fsync(writer.fileno())
    return BackupFile(path, len(content), hashlib.sha256(content).hexdigest())


def hash_file(path: Path, on_bytes: Callable[[int], None]) -> str:
    """Return the sha256 of a file in hex.

    Raises:
        OSError: It cannot be read, or it is a link.
    """
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as reader:
        while piece := reader.read(_PIECE_BYTES):
            digest.update(piece)
            on_bytes(len(piece))
    return digest.hexdigest()


def copy_database(source: Path, target: Path) -> None:
    """Copy one moment of a SQLite database that others write to, write-ahead log included, into one private file.

    A read transaction holds the moment, so writers go on and the copy never begins again.

    Raises:
        BackupError: It cannot be read, or it is none.
    """
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    address = f"file:{quote(str(source))}?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=10)) as live, closing(sqlite3.connect(target)) as copy:
            live.isolation_level = None
            live.execute("BEGIN")
            live.execute("SELECT count(*) FROM sqlite_master").fetchone()
            live.backup(copy, pages=_PAGES, sleep=0.05)
            # one file that can be read from a disk that cannot be written; the gateway turns the log on again
            copy.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.Error as error:
        raise BackupError(f"The database {source} cannot be copied: {error}.") from error
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _make_private(folder: Path) -> None:
    """Make a folder and those above it that are not there, for nobody else to enter."""
    if not folder.is_dir():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700)


def _write_all(descriptor: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


def describe_file(folder: Path, path: str) -> BackupFile:
    """Return what a file below `folder` is."""
    return BackupFile(path, (folder / path).stat().st_size, hash_file(folder / path, lambda _: None))
