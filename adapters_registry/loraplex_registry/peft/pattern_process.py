"""The helper process of `pattern`: matches regular expressions until done or until the kernel ends it.

Reads one job as JSON and writes one line of JSON for each pattern. Standard library only: it starts as a program of
its own where it is no fork.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import sys
import time
from typing import Any, BinaryIO

OUT_OF_TIME = "the expressions before it used up the processor time of all"
MAX_MEMORY_BYTES = 512 * 1024 * 1024


def match_pattern(text: str, names: list[str], *, is_full: bool) -> dict[str, Any]:
    """Match one expression against all names; an invalid one is an answer too."""
    try:
        compiled = re.compile(text)
    except (re.error, RecursionError, OverflowError, MemoryError, ValueError) as error:
        return {"error": f"it is not a valid regular expression: {str(error)[:200]}"}
    match = compiled.fullmatch if is_full else compiled.match
    try:
        return {"matches": {name: found.groupdict().get("idx") or "" for name in names if (found := match(name))}}
    except (RecursionError, MemoryError):
        return {"error": "it takes too much memory"}


def run(reader: BinaryIO, writer: BinaryIO) -> None:
    """Answer the job; the default action of SIGVTALRM ends the process when a pattern's time is up."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # not every system limits address space
    with contextlib.suppress(ValueError, OSError):
        limit = _address_space_bytes() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    job = json.loads(reader.read())
    limit_s, left_s = job["limits_s"]
    for text, is_full in job["patterns"]:
        begin_s = time.process_time()
        # an armed time of zero would disarm the timer
        signal.setitimer(signal.ITIMER_VIRTUAL, max(min(limit_s, left_s), 1e-3))
        answer = match_pattern(text, job["names"], is_full=is_full) if left_s > 0 else {"error": OUT_OF_TIME}
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        # the timer itself only counts whole ticks, so many short matches would look free
        left_s -= time.process_time() - begin_s
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.flush()


def _address_space_bytes() -> int:
    """What the process has at its start, also as the fork of one that has much."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - no more imports than needed
            return int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0


if __name__ == "__main__":
    run(sys.stdin.buffer, sys.stdout.buffer)
