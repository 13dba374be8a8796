"""How this program was started, so that commands which it prints can be copied into another terminal as they are."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def name_program() -> str:
    """Return what starts this program again: `loraplex` where that is on the PATH, else the path that was used."""
    started = sys.argv[0]
    if Path(started).name == "__main__.py":
        return f"{name_python()} -m loraplex"
    return _shorten(Path(started))


def name_python() -> str:
    """Return what starts the Python in which this program is installed."""
    return _shorten(Path(sys.executable))


def _shorten(path: Path) -> str:
    """Return the bare name where the shell finds this very file by it, else the path, from this folder if below it."""
    found = shutil.which(path.name)
    # not resolved: a virtual environment's python is a link to another one
    if found and Path(found).absolute() == path.absolute():
        return path.name
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
