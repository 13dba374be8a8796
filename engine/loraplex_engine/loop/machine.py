"""How much memory there is for this process and how much of it is free: the machine's, or its control group's.

Reads /proc and /sys and changes nothing. Where these say nothing (macOS), memory is what `sysconf` knows, all free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_CGROUPS = "sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes that this process may use in all, and those of them that nobody uses now (page cache counts as free)."""

    total_bytes: int
    free_bytes: int


def read_machine_memory(root: Path = _ROOT) -> MachineMemory:
    """The machine's memory, or the smallest limit of the control groups that this process is in."""
    found = [_read_meminfo(root), *_read_groups(root)]
    return MachineMemory(min(one.total_bytes for one in found), max(0, min(one.free_bytes for one in found)))


def read_process_bytes(field: str = "VmRSS") -> int:
    """Resident bytes of this process, now (`VmRSS`) or at their highest (`VmHWM`); 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), 0)


def forget_peak() -> None:
    """Let `VmHWM` begin anew at what is resident now; without effect where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _read_meminfo(root: Path) -> MachineMemory:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return MachineMemory(total, total)
    values = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.strip()}
    return MachineMemory(values["MemTotal"], values.get("MemAvailable", values["MemTotal"]))


def _read_groups(root: Path) -> Iterator[MachineMemory]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _read_tree(root / _CGROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _read_tree(root / _CGROUPS / "memory", path, *names)


def _read_tree(top: Path, path: str, limit_name: str, used_name: str, cache_name: str) -> Iterator[MachineMemory]:
    """The group and those above it; in a container the path may be the host's, and the group the top."""
    group = top / path.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(top):
            return
        limit, used = _read_number(folder / limit_name), _read_number(folder / used_name)
        if limit is not None and used is not None:
            yield MachineMemory(limit, limit - used + _read_stat(folder / "memory.stat", cache_name))


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        # absent, or `max`: no limit
        return None


def _read_stat(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
