"""What a task may take, told to the kernel, which ends a process that takes more and cannot be asked not to."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
import time
from pathlib import Path

MAX_CPU_S = 0.25
"""Of the task's own work (user time): what the kernel does for it is dear on a machine short of memory, and no fault
of the task. `_MAX_ALL_CPU_S` bounds both together."""
MAX_REGEX_CPU_S = 0.1
_MAX_ALL_CPU_S = 2
MAX_WALL_S = 5.0
"""For what waits instead of working, and for machines that have no time."""
MAX_MEMORY_BYTES = 512 << 20
"""Address space beyond what the process has at its start."""
_PR_SET_PDEATHSIG = 1


def limit_task(cpu_s: float) -> None:
    """Bound this process: its time, memory, files and children."""
    for kind, limit in (
        (resource.RLIMIT_AS, address_space_bytes() + MAX_MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        # the kernel's second clock, in whole seconds
        (resource.RLIMIT_CPU, int(time.process_time()) + _MAX_ALL_CPU_S),
    ):
        # not every system knows every limit
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))
    for number in (signal.SIGVTALRM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    limit_processor(cpu_s)
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)


def limit_processor(cpu_s: float) -> None:
    """Bound the user time that this process may take from now on, all its threads together; 0 lifts the bound."""
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def address_space_bytes() -> int:
    """Return what this process has mapped, 0 where that cannot be known."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return 0
    return pages * resource.getpagesize()
