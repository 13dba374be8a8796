"""Entry of the core process: `python -m loraplex_engine core` calls `main`, which reads a CoreLaunch from stdin."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

import msgspec

from loraplex_engine.config import CoreLaunch
from loraplex_registry.wire.log import configure_log


def main() -> int:
    """Read the launch document, run the core until it drains or its front dies; returns the exit code."""
    # what is no progress and no answer goes past the front
    configure_log("warning", os.environ.get("LORAPLEX_LOG_FORMAT"))
    # a core that is ended because it is stuck says first where
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=CoreLaunch)
    from loraplex_engine.loop.core import run_core

    return run_core(launch)
