"""The data folder of a one-machine platform. `DataFolder` locks it and makes in it what the gateway does not.

    admin.key  key.pepper  signing.pem  verify.pem  engine.key  url  lock  loraplex.db  objects/  logs/

Secrets are made at first start, readable by their owner only, and kept: a new pepper would void every API key.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from loraplex.client.location import ADMIN_KEY_FILE, URL_FILE
from loraplex.keys.files import load_signing_key
from loraplex.supervisor.errors import FolderInUseError, UpError
from loraplex_registry.wire.identity import TokenSigner

_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_MAX_LOG_BYTES = 16 * 1024 * 1024


class DataFolder:
    """Paths and secrets of one platform."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().resolve()
        self.url = self.path / URL_FILE
        self.database = self.path / "loraplex.db"
        self.admin_key = self.path / ADMIN_KEY_FILE
        self.verify_keys = self.path / "verify.pem"
        self.engine_key = self.path / "engine.key"

    @property
    def database_url(self) -> str:
        """SQLAlchemy URL of the SQLite file."""
        return f"sqlite+aiosqlite:///{self.database}"

    @property
    def object_store_url(self) -> str:
        """URL of the folder that holds adapters."""
        return f"file://{self.path / 'objects'}"

    def log(self, part: str) -> Path:
        """File that takes the output of one part."""
        return self.path / "logs" / f"{part}.log"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process until the block ends, or the process does.

        Raises:
            FolderInUseError: Another process holds it.
            UpError: It cannot be made or written.
        """
        with self._open_lock() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FolderInUseError(
                    f"Another `loraplex up` uses {self.path}. Stop it, or choose another folder with --data-dir."
                ) from error
            yield

    def _open_lock(self) -> TextIO:
        try:
            self.path.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
            return (self.path / "lock").open("w")
        except OSError as error:
            why = "it is a file, not a folder" if isinstance(error, FileExistsError) else error.strerror
            raise UpError(
                f"{self.path} cannot be the data folder ({why}). Choose another one with --data-dir."
            ) from error

    def prepare(self, signing_key: str | None) -> TokenSigner:
        """Make what is absent, turn over logs that grew long, and return a signer with the key in use.

        Args:
            signing_key: The operator's own (LORAPLEX_SIGNING_KEY); None uses the folder's.
        """
        logs = self.path / "logs"
        for folder in (logs, self.path / "objects"):
            folder.mkdir(mode=_PRIVATE_FOLDER, exist_ok=True)
        for log in logs.glob("*.log"):
            if log.stat().st_size > _MAX_LOG_BYTES:
                log.replace(log.with_suffix(".log.1"))
        if not self.engine_key.exists():
            write_private(self.engine_key, secrets.token_urlsafe(32))
        signer = TokenSigner(load_signing_key(signing_key, self.path))
        write_private(self.verify_keys, signer.public_pem.decode())
        return signer


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all, on the disk when this returns."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE_FILE), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
