"""Licences: each locked package has its row, by what is installed, and nothing is used that would bind us."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def licences() -> ModuleType:
    spec = importlib.util.spec_from_file_location("licences", ROOT / "scripts" / "licences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    import sys

    sys.modules["licences"] = module
    spec.loader.exec_module(module)
    return module


def test_every_locked_package_has_a_row(licences: ModuleType) -> None:
    assert set(licences.list_locked()) - licences.read_rows().keys() <= {"triton"}, "run scripts/licences.py"


def test_rows_say_what_is_installed(licences: ModuleType) -> None:
    rows = licences.read_rows()
    packages = licences.list_packages()
    assert len(packages) > 100
    # what runs depends on the platform; the licence does not
    differing = {one.name: one.licence for one in packages if f"| {one.licence} |" not in rows.get(one.name, "")}
    assert differing == {}, "run scripts/licences.py"


def test_no_licence_is_used_that_nobody_has_allowed(licences: ModuleType) -> None:
    assert licences.find_faults(licences.list_packages()) == []


@pytest.mark.parametrize(
    "licence", ["GPL-3.0-only", "AGPL-3.0-or-later", "MIT AND SSPL-1.0", "not said", "Proprietary"]
)
def test_what_binds_is_a_fault(licences: ModuleType, licence: str) -> None:
    assert licences.find_faults([licences.Package("x", licence, "")]) == [f"x: {licence}"]


def test_choices_and_exceptions_are_read(licences: ModuleType) -> None:
    for licence in ("MIT OR Apache-2.0", "MPL-2.0 AND (Apache-2.0 OR MIT)", "Apache-2.0 WITH LLVM-exception"):
        assert licences.find_faults([licences.Package("x", licence, "")]) == []
