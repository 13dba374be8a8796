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
import time
from typing import Any

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
        begin_s = time.process_time()
        # an armed time of zero would disarm the timer
        signal.setitimer(signal.ITIMER_VIRTUAL, max(min(limit_s, left_s), 1e-3))
        answer = match_pattern(text, job["names"], is_full=is_full) if left_s > 0 else {"error": OUT_OF_TIME}
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        # the timer itself only counts whole ticks, so many short matches would look free
        left_s -= time.process_time() - begin_s
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    run()
