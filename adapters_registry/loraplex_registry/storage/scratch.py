"""A private folder of this machine for uploads on their way, of stores that lie elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

from loraplex_registry.storage.failure import unavailable_on_failure
from loraplex_registry.storage.file import idle_s
from loraplex_registry.wire.ids import new_uuid


class Scratch:
    """Staging folders below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def create(self) -> Path:
        """Create an empty folder; the caller removes it."""
        folder = self.root / new_uuid().hex
        with unavailable_on_failure():
            folder.mkdir(mode=0o700)
        return folder

    def sweep(self, min_age_s: float) -> int:
        """Remove folders that nobody has written to for `min_age_s` seconds, and return how many."""
        old = [folder for folder in self.root.iterdir() if idle_s(folder) > min_age_s]
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)
        return len(old)
