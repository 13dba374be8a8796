"""A disk of a few megabytes, for tests that fill one: a tmpfs, where this process may mount it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DiskUnavailable(Exception):
    """None can be mounted; the message says why."""


@contextmanager
def small_disk(num_bytes: int) -> Iterator[Path]:
    """Yield an empty folder that is a disk of its own.

    Raises:
        DiskUnavailable: This process may not mount one.
    """
    with tempfile.TemporaryDirectory(prefix="lpx-disk-") as folder:
        argv = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=0700", "none", folder]
        done = subprocess.run(argv, capture_output=True, text=True, check=False) if sys.platform == "linux" else None
        if done is None or done.returncode != 0:
            raise DiskUnavailable(done.stderr.strip() if done is not None else "no tmpfs")
        try:
            yield Path(folder)
        finally:
            # lazily: a process that is about to end may still hold a file
            subprocess.run(["umount", "-l", folder], check=False)
