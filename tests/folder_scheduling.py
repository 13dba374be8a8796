"""Who runs what where a run has several processes: a file is the unit, and a folder whose tests share a platform.

Each process would start that platform for itself.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

SHARED_FOLDERS = ("tests/cases/integration/", "tests/e2e/shared/")


class FolderScheduling(LoadFileScheduling):
    """`--dist loadfile` that keeps some folders together."""

    def _split_scope(self, nodeid: str) -> str:
        folder = next((folder for folder in SHARED_FOLDERS if nodeid.startswith(folder)), None)
        return folder or super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FolderScheduling | None:
    """Take the place of `--dist loadfile`."""
    return FolderScheduling(config, log) if config.getoption("dist") == "loadfile" else None
