"""The folders of pulled bases: what marks one complete, how it is published, found and read.

A base is `<parent>/<name>/`; it is written beside its place and renamed into it, so a folder with `complete.json` is
whole. Only `pull`, under the base's lock, writes here; everybody else reads.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from loraplex_engine.bases.progress import PullProgress
from loraplex_engine.errors import BaseUnavailableError
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.peft.unreadable import UNREADABLE
from loraplex_registry.wire.naming import InvalidNameError, served_name

_T = TypeVar("_T")
SPEC_FILE, MARKER_FILE = "base.json", "complete.json"


class FileStamp(msgspec.Struct, frozen=True):
    """A file as it was when the base was pulled; enough to see a later change without reading it."""

    size: int
    mtime_ns: int


class Origin(msgspec.Struct, frozen=True):
    """Where a base came from.

    `kind` is `folder`, `gguf`, `hub` or `wheel`; `spec` what was asked for (an absolute path for files), `revision` the
    hub's commit or the file's digest, `inputs` the stamps of a user's own files, which a second pull compares.
    """

    kind: str
    spec: str
    revision: str = ""
    inputs: dict[str, FileStamp] = {}


class Marker(msgspec.Struct, frozen=True):
    """`complete.json`: the origin, the stamp of every file, the sha256 of every tensor's bytes, the model's digest.

    `digest` is that of `manifest`; empty in a folder that was pulled before there was one.
    """

    origin: Origin
    files: dict[str, FileStamp]
    tensors: dict[str, str]
    version: int = 1
    digest: str = ""


def bases_dir(cache_dir: Path) -> Path:
    """Where the machine-wide cache keeps its bases."""
    return cache_dir / "bases"


def is_complete(folder: Path) -> bool:
    """Say whether `folder` is a pulled base."""
    return (folder / MARKER_FILE).is_file() and (folder / SPEC_FILE).is_file()


def load_spec(folder: Path) -> BaseSpec:
    """The spec of the pulled base in `folder`.

    Raises:
        BaseUnavailableError: it is not a pulled base, or a file of it changed, vanished or rotted since.
    """
    check_unchanged(folder)
    return _read(folder / SPEC_FILE, BaseSpec)


def load_marker(folder: Path) -> Marker:
    """The marker of the pulled base in `folder`.

    Raises:
        BaseUnavailableError: it cannot be read.
    """
    return _read(folder / MARKER_FILE, Marker)


def find_marker(folder: Path) -> Marker | None:
    """The marker of the base in `folder`; None if it is not a pulled base, or its marker cannot be read."""
    try:
        return load_marker(folder)
    except BaseUnavailableError:
        return None


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise BaseUnavailableError(f"{path} cannot be read: {error.strerror}; pull the base again.") from error
    except UNREADABLE as error:
        raise BaseUnavailableError(f"{path} is damaged; pull the base again.") from error


def check_unchanged(folder: Path) -> None:
    """Raise BaseUnavailableError unless every file of the base is as it was when it was pulled."""
    if not is_complete(folder):
        raise BaseUnavailableError(f"{folder} is not a pulled base; run `loraplex base pull {folder}` first.")
    for name, then in load_marker(folder).files.items():
        if not _is_as_it_was(folder / name, then):
            target = (folder / name).resolve()
            raise BaseUnavailableError(f"{target} changed or vanished since the base was pulled; pull it again.")


def _is_as_it_was(path: Path, then: FileStamp) -> bool:
    # a folder may be copied to another machine, which gives our own files new times; a user's file behind a link is
    # somebody else's to change, so there the time counts
    now = find_stamp(path)
    return now is not None and now.size == then.size and (not path.is_symlink() or now.mtime_ns == then.mtime_ns)


def find_base(name_or_spec: str, cache_dir: Path) -> Path | None:
    """The folder of a pulled base by its path, its served name, or the spec that it was pulled from; None if absent."""
    if is_complete(Path(name_or_spec)):
        return Path(name_or_spec).resolve()
    by_name = bases_dir(cache_dir) / _folder_name(name_or_spec)
    if name_or_spec == by_name.name and is_complete(by_name):
        return by_name
    wanted = {name_or_spec, str(Path(name_or_spec).absolute())}
    found = (folder for folder in list_bases(cache_dir) if _origin_spec(folder) in wanted)
    return next(found, None)


def _origin_spec(folder: Path) -> str | None:
    marker = find_marker(folder)
    return None if marker is None else marker.origin.spec


def list_bases(cache_dir: Path) -> list[Path]:
    """The folders of all pulled bases of the cache, by name."""
    parent = bases_dir(cache_dir)
    return sorted(folder for folder in parent.iterdir() if is_complete(folder)) if parent.is_dir() else []


def find_stamp(path: Path) -> FileStamp | None:
    """Size and time of the file (behind a link); None if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return FileStamp(status.st_size, status.st_mtime_ns)


def write_spec(folder: Path, spec: BaseSpec) -> None:
    """Write or replace `base.json`, whole or not at all."""
    _write_whole(folder / SPEC_FILE, msgspec.json.format(msgspec.json.encode(spec), indent=2))


def write_marker(folder: Path, marker: Marker) -> None:
    """Write or replace `complete.json`, whole or not at all."""
    _write_whole(folder / MARKER_FILE, msgspec.json.format(msgspec.json.encode(marker), indent=2))


def publish(staging: Path, target: Path, origin: Origin, tensors: dict[str, str], digest: str) -> None:
    """Mark `staging` complete and put it in the place of `target`; the caller holds the base's lock."""
    names = sorted(path.name for path in staging.iterdir() if path.name != SPEC_FILE)
    files = {name: stamp for name in names if (stamp := find_stamp(staging / name))}
    write_marker(staging, Marker(origin, files, tensors, digest=digest))
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        staging.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        staging.rename(target)
    _sync(target.parent)


@contextmanager
def locked(target: Path, progress: PullProgress) -> Iterator[None]:
    """Hold the lock of the base that lies, or will lie, in `target`; waits while another process pulls it.

    The kernel frees the lock when its holder dies, so a killed pull never blocks the next one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note(f"Another process is pulling {target.name}; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _folder_name(spec: str) -> str:
    try:
        return served_name(spec)
    except InvalidNameError:
        return "-"


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
