"""Which uploads in parts were begun from this machine, so that a later run goes on where one was cut.

One small file an upload, below the cache folder: it names the upload and holds no key and no bytes of the adapter.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loraplex.client.part_plan import FilePlan
from loraplex_registry.peft.unreadable import UNREADABLE

_FOLDER = "uploads"
_LIFE_S = 48 * 3600
"""The platform forgets an upload after a day; what is remembered of it goes a day later."""


class _Note(msgspec.Struct, frozen=True):
    upload: str


class UploadMemory:
    """Remembers the ids of uploads by where they go and what they hold; a memory that cannot be kept is none."""

    def __init__(self, cache_dir: Path) -> None:
        self._folder = cache_dir / _FOLDER

    def find(self, key: str) -> str | None:
        """Return the id of the upload begun under `key`, None if none is known."""
        try:
            return msgspec.json.decode((self._folder / key).read_bytes(), type=_Note).upload
        except (OSError, *UNREADABLE):
            return None

    def keep(self, key: str, upload: str) -> None:
        """Remember an upload, in one step, also against a power cut; what is too old goes."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._sweep()
            handle, draft = tempfile.mkstemp(dir=self._folder, prefix=".")
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(_Note(upload)))
                file.flush()
                os.fsync(file.fileno())
            Path(draft).replace(self._folder / key)

    def forget(self, key: str) -> None:
        """Forget an upload that is over."""
        with contextlib.suppress(OSError):
            (self._folder / key).unlink(missing_ok=True)

    def _sweep(self) -> None:
        for path in self._folder.iterdir():
            if time.time() - path.stat().st_mtime > _LIFE_S:
                path.unlink(missing_ok=True)


def build_key(url: str, tenant: str, adapter: str, options: dict[str, str], plans: Sequence[FilePlan]) -> str:
    """Return what tells one upload from another: where it goes, how it is meant, and what it holds."""
    facts = [url, tenant, adapter, sorted(options.items()), [plan.announce() for plan in plans]]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()
