"""Which process listens on a port of this machine, as /proc says; nobody where it does not (macOS, other users)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"
_PROC = Path("/proc")


@dataclass(frozen=True)
class Listener:
    """A process that listens."""

    pid: int
    name: str


def find_listener(port: int) -> Listener | None:
    """Return who listens on `port`."""
    links = {f"socket:[{inode}]" for inode in _find_inodes(port)}
    if not links:
        return None
    for folder in _PROC.glob("[0-9]*"):
        # processes end, and those of others say nothing
        with contextlib.suppress(OSError):
            if any(str(link.readlink()) in links for link in (folder / "fd").iterdir()):
                return Listener(int(folder.name), _read_name(folder))
    return None


def _find_inodes(port: int) -> list[str]:
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.append(fields[9])
    return found


def _read_name(folder: Path) -> str:
    """Return the program and its first words, never its arguments: these may hold secrets."""
    words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    program = Path(words[0]).name or (folder / "comm").read_text().strip()
    return f"{program} -m {words[2]}" if words[1:2] == ["-m"] and len(words) > 2 else program
