"""What a backup says of itself: `backup.json`, written last, with the size and sha256 of every other file.

    backup.json  loraplex.db  secrets/  objects/sha256/ab/cd/<hex>/...  bases/NAME/...

`seal` is the sha256 of everything else in it. It proves that nothing rotted, not who made it: whoever can write a
backup can write a seal.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec

from loraplex.backup.errors import BackupError, NewerError
from loraplex_registry.wire.fault import Fault, NamedBase

FORMAT = 1
"""Of the layout and of this file; a program refuses higher ones."""

MANIFEST, DATABASE, OBJECTS, SECRETS, BASES = "backup.json", "loraplex.db", "objects", "secrets", "bases"
_MAX_MANIFEST_BYTES = 512 << 20
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_PATH = re.compile(
    rf"loraplex\.db|secrets/(admin\.key|key\.pepper|signing\.pem|engine\.key)|bases/{_NAME}/{_NAME}"
    rf"|objects/sha256/[0-9a-f]{{2}}/[0-9a-f]{{2}}/[0-9a-f]{{64}}/(manifest\.json|(files|extra)/{_NAME})"
)


class BackupFile(msgspec.Struct, frozen=True):
    """One file: its path below the backup's folder, its size in bytes and its sha256 in hex."""

    path: str
    size: int
    sha256: str


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`backup.json`.

    `revision` is that of the database's schema, `made_by` the program's version, `made_at` RFC 3339 in UTC: of the copy
    of the database, so of the moment that a restore leads back to. `bases` are what adapters belong to, copied or not.
    `damaged` is what was broken in the platform already when the backup was made, and is therefore not in it.
    """

    format: int = FORMAT
    made_by: str
    made_at: str
    revision: str
    files: tuple[BackupFile, ...]
    bases: tuple[NamedBase, ...]
    num_artifacts: int
    damaged: tuple[Fault, ...] = ()
    seal: str = ""

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(file.size for file in self.files)

    def list_names(self, folder: str) -> list[str]:
        """Return the first part of each path below `folder`."""
        inside = (file.path.removeprefix(f"{folder}/") for file in self.files if file.path.startswith(f"{folder}/"))
        return sorted({path.partition("/")[0] for path in inside})


class _Head(msgspec.Struct):
    format: int


def seal(manifest: BackupManifest) -> BackupManifest:
    """Return the manifest with the seal that belongs to it."""
    return msgspec.structs.replace(manifest, seal=_compute_seal(manifest))


def encode_manifest(manifest: BackupManifest) -> bytes:
    """Return the content of `backup.json`."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def read_manifest(folder: Path) -> BackupManifest:
    """Return what the backup in `folder` says of itself.

    Raises:
        BackupError: It holds none, or one that rotted.
        NewerError: It is of a format that this program does not know.
    """
    try:
        with (folder / MANIFEST).open("rb") as file:
            content = file.read(_MAX_MANIFEST_BYTES)
        head = msgspec.json.decode(content, type=_Head)
        if head.format > FORMAT:
            raise NewerError(f"The backup has format {head.format}, this program reads up to {FORMAT}; upgrade it.")
        manifest = msgspec.json.decode(content, type=BackupManifest)
    except FileNotFoundError as error:
        raise BackupError(f"{folder} is no backup: there is no {MANIFEST} in it.") from error
    except OSError as error:
        raise BackupError(f"{folder / MANIFEST} cannot be read: {error.strerror}.") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BackupError(f"{folder / MANIFEST} is damaged: {error}. Take another backup.") from error
    if manifest.seal != _compute_seal(manifest):
        raise BackupError(f"{folder / MANIFEST} is damaged: its seal does not fit. Take another backup.")
    odd = [file.path for file in manifest.files if file.size < 0 or _PATH.fullmatch(file.path) is None]
    if odd or len({file.path for file in manifest.files}) != len(manifest.files):
        raise BackupError(f"{folder / MANIFEST} names what no backup holds: {ascii(odd[:1])[1:-1]}. Nothing was read.")
    return manifest


def _compute_seal(manifest: BackupManifest) -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(manifest, seal=""))).hexdigest()
