"""The clock that the chaos suite sets is the time of day of a Python process, and only that."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clock_shim import Clock, ClockUnavailable

PROGRAM = "import time, datetime; print(time.time(), datetime.datetime.now().timestamp(), time.monotonic())"


def test_sets_the_time_of_day_and_no_other_clock(tmp_path: Path) -> None:
    try:
        clock = Clock(tmp_path)
    except ClockUnavailable as reason:
        pytest.skip(str(reason))
    clock.step(3600)
    before = (time.time() + 3600, time.time() + 3600, time.monotonic())
    found = subprocess.check_output([sys.executable, "-c", PROGRAM], env=os.environ | clock.environ, text=True)
    for expected, shown in zip(before, found.split(), strict=True):
        assert 0 <= float(shown) - expected < 60
