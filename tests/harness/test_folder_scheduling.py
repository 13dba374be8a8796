"""Tests that share a platform go to one process, and all others by their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from folder_scheduling import SHARED_FOLDERS, FolderScheduling, pytest_xdist_make_scheduler

ROOT = Path(__file__).resolve().parents[2]


def test_a_folder_that_shares_a_platform_is_one_unit() -> None:
    split = FolderScheduling.__new__(FolderScheduling)._split_scope
    assert split("tests/e2e/shared/test_a.py::test_x[a::b]") == split("tests/e2e/shared/test_b.py::test_y")
    assert split("tests/e2e/test_a.py::test_x[a::b]") == "tests/e2e/test_a.py"


def test_each_such_folder_starts_its_platform_once_for_a_process() -> None:
    for folder in SHARED_FOLDERS:
        assert 'scope="session"' in (ROOT / folder / "conftest.py").read_text(encoding="utf-8")


def test_it_serves_runs_of_several_processes(pytestconfig: pytest.Config) -> None:
    found = pytestconfig.pluginmanager.get_plugin(pytest_xdist_make_scheduler.__module__)
    assert found is not None
    assert found.pytest_xdist_make_scheduler is pytest_xdist_make_scheduler
