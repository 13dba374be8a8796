"""How many connections a server may hold: each is an open file, and the usual limit of 1024 is soon reached.

Whoever opens so many, even without a key, would keep all others out.
"""

from __future__ import annotations

import resource
from contextlib import suppress


def allow_open_files() -> int:
    """Let this process open as many files as it may, and return how many."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # some systems say that there is no limit, and take none
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return most
    return soft
