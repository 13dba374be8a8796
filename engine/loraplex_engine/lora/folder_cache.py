"""Folders by digest below one root, under a cap of bytes: what was used longest ago goes first.

`FolderCache` is the only writer of `CACHE/adapters`. A folder comes and goes by one rename, so whatever kills the
process leaves whole folders, and beside them names with a dot that the next start sweeps away. Bytes are counted from
the folders themselves at the start and kept exact from then on; a folder that another process put here is counted when
it is first used. Knows no adapters.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loraplex_registry.wire.digest import artifact_path

_STAGED, _GONE = ".fetch-", ".gone-"
_ROOM_S = 30.0
"""How long a fetch waits for loads that hold everything else."""


class NoRoomError(Exception):
    """The cache of adapters on disk has no room for another one; raise its cap."""


class FolderCache:
    """At most `max_bytes` of folders below `root`; safe for threads."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._lock = threading.Condition()
        self._reserved = 0
        self._holds: Counter[str] = Counter()
        self._num_evictions = 0
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sweep()
        self._sizes = self._scan()
        with self._lock:
            self._try_make_room(0)

    @property
    def num_folders(self) -> int:
        """Folders that are here."""
        with self._lock:
            return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return sum(self._sizes.values())

    def take_evictions(self) -> int:
        """Folders pushed out for others since the last call."""
        with self._lock:
            count, self._num_evictions = self._num_evictions, 0
        return count

    @contextmanager
    def hold(self, digest: str) -> Iterator[Path]:
        """Keep the digest's folder from being pushed out; yields where it lies or would lie."""
        with self._lock:
            self._holds[digest] += 1
            self._touch(digest)
        try:
            yield self._root / artifact_path(digest)
        finally:
            with self._lock:
                self._holds[digest] -= 1
                self._holds += Counter()
                self._lock.notify_all()

    @contextmanager
    def stage(self, num_bytes: int) -> Iterator[Path]:
        """Make room and an empty folder for that many bytes; it vanishes at the end unless it was published.

        Raises:
            NoRoomError: The cap is too low, or loads held the rest of the cache for too long.
        """
        self._reserve(num_bytes)
        try:
            with self._staged() as folder:
                yield folder
        finally:
            with self._lock:
                self._reserved -= num_bytes
                self._lock.notify_all()

    def publish(self, digest: str, staged: Path) -> None:
        """Let a staged folder, whose files are synced, be the digest's."""
        target = self._root / artifact_path(digest)
        with self._lock:
            self._retire(digest)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            staged.rename(target)
            self._sizes[digest] = _measure(target)
        sync(target)
        sync(target.parent)

    def remove(self, digest: str) -> None:
        """Delete the digest's folder if there is one."""
        with self._lock:
            self._retire(digest)

    def check_integrity(self) -> None:
        """Assert that the account is what lies there, that the cap holds, and that nothing is left over."""
        with self._lock:
            assert self._scan() == dict(self._sizes)
            assert self.num_bytes + self._reserved <= self._max_bytes or all(d in self._holds for d in self._sizes)
            assert self._holds.total() > 0 or not self._reserved
            assert self._reserved or not [path for path in self._root.iterdir() if path.name.startswith(".")]

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise NoRoomError(
                f"it has {num_bytes} bytes, and the disk cache of adapters may have {self._max_bytes}: "
                "an administrator has to raise --adapter-cache-bytes"
            )
        with self._lock:
            if not self._lock.wait_for(lambda: self._try_make_room(num_bytes), _ROOM_S):
                raise NoRoomError("other loads hold the whole disk cache of adapters")
            self._reserved += num_bytes

    def _try_make_room(self, num_bytes: int) -> bool:
        """Push out what nobody holds, oldest first, until that many bytes fit."""
        limit = self._max_bytes - self._reserved - num_bytes
        for digest in [digest for digest in self._sizes if digest not in self._holds]:
            if self.num_bytes <= limit:
                break
            self._retire(digest)
            self._num_evictions += 1
        return self.num_bytes <= limit

    def _touch(self, digest: str) -> None:
        """Note that the digest is used now, also for the next process."""
        folder = self._root / artifact_path(digest)
        try:
            os.utime(folder)
        except FileNotFoundError:
            self._sizes.pop(digest, None)
            return
        if digest not in self._sizes:
            self._sizes[digest] = _measure(folder)
            self._try_make_room(0)
        self._sizes.move_to_end(digest)

    def _retire(self, digest: str) -> None:
        """Rename first: a folder is whole or not there."""
        folder = self._root / artifact_path(digest)
        gone = self._root / f"{_GONE}{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            folder.rename(gone)
        self._sizes.pop(digest, None)
        shutil.rmtree(gone, ignore_errors=True)
        for parent in (folder.parent, folder.parent.parent):
            with contextlib.suppress(OSError):
                parent.rmdir()

    @contextmanager
    def _staged(self) -> Iterator[Path]:
        """A folder under a lock that ends with this process, so that a sweep can tell it from an abandoned one."""
        folder, handle = self._lock_new_folder()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)

    def _lock_new_folder(self) -> tuple[Path, int]:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=_STAGED, dir=self._root))
            with contextlib.suppress(FileNotFoundError):
                handle = os.open(folder, os.O_RDONLY)
                fcntl.flock(handle, fcntl.LOCK_EX)
                if folder.exists():
                    return folder, handle
                # a sweep was faster than our lock
                os.close(handle)

    def _sweep(self) -> None:
        """Remove what processes left behind that were killed; whoever still fetches holds a lock."""
        for left in self._root.glob(f"{_STAGED}*"):
            with contextlib.suppress(OSError):
                handle = os.open(left, os.O_RDONLY)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
                finally:
                    os.close(handle)
        for left in self._root.glob(f"{_GONE}*"):
            shutil.rmtree(left, ignore_errors=True)

    def _scan(self) -> OrderedDict[str, int]:
        """Digest to bytes of what lies here, least recently used first; nothing else counts."""
        found = []
        for folder in self._root.glob("sha256/*/*/*"):
            digest = f"sha256:{folder.name}"
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
                if self._root / artifact_path(digest) == folder:
                    found.append((folder.stat().st_mtime_ns, digest, _measure(folder)))
        return OrderedDict((digest, num_bytes) for _, digest, num_bytes in sorted(found))


def sync(path: Path) -> None:
    """Wait until the file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _measure(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries)
