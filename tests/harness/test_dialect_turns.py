"""Which database a test gets whose folder lets its tests take turns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FILE = "tests/registry/api/test_alias.py"
ROOT = Path(__file__).resolve().parents[2]


def test_each_test_runs_on_one_database_and_at_full_length_on_both() -> None:
    sample, full = collect(), collect("-m", "endure", "--endure")
    assert {len(dialects) for dialects in full.values()} == {2}
    chosen = [sample[test] for test in full]
    assert chosen.count({"postgres"}) == len(full) // 2
    assert chosen.count({"sqlite"}) == (len(full) + 1) // 2


def collect(*options: str) -> dict[str, set[str]]:
    """The databases of each test of a file."""
    argv = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", FILE, *options]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, set[str]] = {}
    for test, dialect in re.findall(rf"^{FILE}::(\w+)\[(sqlite|postgres)\]$", done.stdout, re.MULTILINE):
        found.setdefault(test, set()).add(dialect)
    return found
