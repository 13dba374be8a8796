"""Folders whose tests share what is dear to build, such as a platform: run by one process, and closed after the last.

Of several processes each would build it for itself. A file is the unit of all other tests.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

T = TypeVar("T")
CASES = "tests/cases/integration/"
PLATFORM = "tests/e2e/shared/"
SHARED_FOLDERS = (CASES, PLATFORM)
_open: defaultdict[str, ExitStack] = defaultdict(ExitStack)


class FolderScheduling(LoadFileScheduling):
    """`--dist loadfile` that keeps some folders together."""

    def _split_scope(self, nodeid: str) -> str:
        return _find_folder(nodeid) or super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FolderScheduling | None:
    """Take the place of `--dist loadfile`."""
    return FolderScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def open_in(folder: str, opened: AbstractContextManager[T]) -> T:
    """Enter what a folder's tests share; it ends with the last of them: idle it holds memory and a part of a core."""
    return _open[folder].enter_context(opened)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close what the folder of this test shares, if the next one is of another."""
    folder = _find_folder(item.nodeid)
    if folder is not None and (nextitem is None or _find_folder(nextitem.nodeid) != folder):
        _open.pop(folder, ExitStack()).close()


def _find_folder(nodeid: str) -> str | None:
    return next((folder for folder in SHARED_FOLDERS if nodeid.startswith(folder)), None)
