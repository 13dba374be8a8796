"""What a user can meet has a word in the docs: settings, error codes, metrics, commands. And the docs invent none."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from loraplex_engine.metrics import EngineMetrics
from loraplex_registry.wire.setting import SETTINGS, Setting

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
ERROR_MODULES = (
    "loraplex.errors",
    "loraplex.client.errors",
    "loraplex_engine.errors",
    "loraplex_registry.errors",
    "loraplex_registry.peft.errors",
)
TEST_SETTINGS = {"LORAPLEX_TEST_PG", "LORAPLEX_TEST_REQUIRE"}


def _page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("setting", [one for one in SETTINGS if one.is_built], ids=lambda one: one.name)
def test_setting_has_a_row_with_its_default(setting: Setting) -> None:
    row = re.search(rf"^\| `{setting.name}` \|.*$", _page("settings.md"), re.MULTILINE)
    assert row, f"add {setting.name} to docs/settings.md"
    assert setting.default is None or f"`{setting.default}`" in row[0]


def test_docs_name_no_setting_that_does_not_exist() -> None:
    known = {setting.name for setting in SETTINGS} | TEST_SETTINGS
    named = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"\bLORAPLEX_[A-Z][A-Z_]*[A-Z]\b(?!\*)", page.read_text(encoding="utf-8"))
        if name.removesuffix("_FILE") not in known
    }
    assert named == set()


def _codes(module: ModuleType) -> Iterator[str]:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == module.__name__:
            code = getattr(value, "code", None)
            if isinstance(code, str):
                yield code


def _known_codes() -> set[str]:
    return {code for name in ERROR_MODULES for code in _codes(importlib.import_module(name))}


def test_every_error_code_has_a_heading_and_no_heading_lacks_a_code() -> None:
    headings = set(re.findall(r"^### `([a-z_]+)`$", _page("errors.md"), re.MULTILINE))
    assert headings == _known_codes()


def test_every_metric_of_the_engine_is_documented() -> None:
    documented = set(re.findall(r"^\| `(loraplex_[a-z_]+)` \|", _page("metrics.md"), re.MULTILINE))
    families = {family.name: family.type for family in EngineMetrics().registry.collect()}
    exported = {f"{name}_total" if kind == "counter" else name for name, kind in families.items()}
    assert exported - documented == set()


def _help_of(*words: str) -> str:
    command = [sys.executable, "-m", "loraplex", *words, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
