"""The helper process of `pattern`: matches regular expressions until done or until the kernel ends it.

Reads one job as JSON from standard input and writes one line of JSON for each pattern. Standard library only; it is
never imported.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import sys
from typing import Any

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


def run() -> None:
    """Answer the job; the default action of SIGVTALRM ends the process when a pattern's time is up."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # not every system limits address space
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    job = json.load(sys.stdin)
    limit_s, left_s = job["limits_s"]
    for text, is_full in job["patterns"]:
        armed_s = min(limit_s, left_s)
        signal.setitimer(signal.ITIMER_VIRTUAL, armed_s)
        answer = match_pattern(text, job["names"], is_full=is_full)
        unused_s, _ = signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        # an armed time of zero would disarm the timer
        left_s = max(left_s - (armed_s - unused_s), 1e-3)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    run()
