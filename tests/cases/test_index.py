"""The table of cases tells the truth: each test that it names exists, and each case that a test names is in it."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
TABLE = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_every_test_in_the_table_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE)
    assert len(named) > 70
    absent = {
        (file, test)
        for file, test in named
        if not (path := FOLDER.parent / file).exists() or f"def {test}(" not in path.read_text(encoding="utf-8")
    }
    assert absent == set()


def test_every_case_that_a_test_is_named_after_is_in_the_table() -> None:
    files = sorted(FOLDER.rglob("test_*.py"))
    names = {name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text(encoding="utf-8"))}
    rows = {row.split("|")[1]: row for row in TABLE.splitlines() if row.startswith("| ")}
    for name in names:
        for case in re.findall(r"_((?:b\d{3}|e\d))(?=_)", name):
            assert any(case.upper() in cell and name in row for cell, row in rows.items()), (case, name)
