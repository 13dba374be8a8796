"""Lets the tests of some places run on one of the two databases each, in turn; `make endure` runs them on both.

What they ask passes HTTP and many statements that have tests of their own on both. In each file both are met.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

PLACES = ("registry/api/", "registry/integration/test_cases.py")


def take_turns(config: pytest.Config, items: list[pytest.Item], tests: Path) -> None:
    """Deselect of each such test one of its two databases; with `--endure` mark them as what is left out otherwise."""
    turns: dict[tuple[Path, str], int] = {}
    in_file = Counter[Path]()
    left_out: set[pytest.Item] = set()
    for item in items:
        dialect = _find_dialect(item, tests)
        if dialect is None:
            continue
        item.add_marker("endure")
        test = (item.path, item.name.replace(dialect, ""))
        if test not in turns:
            turns[test] = in_file[item.path] % 2
            in_file[item.path] += 1
        if (dialect == "postgres") != bool(turns[test]):
            left_out.add(item)
    if left_out and not config.getoption("--endure"):
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _find_dialect(item: pytest.Item, tests: Path) -> str | None:
    """The database of a test that runs on both, if it stands where tests take turns."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec") or not item.path.is_relative_to(tests):
        return None
    if not item.path.relative_to(tests).as_posix().startswith(PLACES) or _is_for_one(item):
        return None
    found = item.callspec.params.get("dialect")
    return found if isinstance(found, str) else None


def _is_for_one(item: pytest.Function) -> bool:
    marks = [mark for mark in item.iter_markers("parametrize") if mark.args and mark.args[0] == "dialect"]
    return any(len(mark.args[1]) < 2 for mark in marks)
