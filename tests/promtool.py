"""Finds `promtool`, which judges Prometheus rules: the system's own, or that of Debian's package, in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

DOWNLOAD_S = 120


class PromtoolUnavailable(Exception):
    """There is none, and none could be fetched."""


def find_promtool() -> Path:
    """Return the path of the program.

    Raises:
        PromtoolUnavailable: The message says why there is none.
    """
    if found := shutil.which("promtool"):
        return Path(found)
    cache = Path(os.environ.get("LORAPLEX_CACHE_DIR", Path.home() / ".cache" / "loraplex")) / "tools"
    program = cache / "promtool"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            shutil.move(_download(Path(name)), program)
    return program


def _download(folder: Path) -> Path:
    # apt reads as a user of its own
    folder.chmod(0o755)
    download = ("apt-get", "download", "prometheus")
    try:
        try:
            _run(folder, *download)
        except subprocess.CalledProcessError:
            _run(folder, "apt-get", "update")
            _run(folder, *download)
        _run(folder, "dpkg-deb", "-x", *map(str, folder.glob("*.deb")), ".")
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"there is none, and Debian's package prometheus could not be had: {error}"
        raise PromtoolUnavailable(reason) from error
    return folder / "usr" / "bin" / "promtool"


def _run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=DOWNLOAD_S)
