"""CHANGELOG.md keeps the form of Keep a Changelog, so that operators find what a version changed for them."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest
from packaging.version import Version

from loraplex.version import __version__

ROOT = Path(__file__).resolve().parents[2]
HEADING = re.compile(r"^## \[?(?P<version>[^\s\]]+)\]? - (?P<date>unreleased|\d{4}-\d{2}-\d{2})$")
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
NOT_YET = "Not yet"
"""What a version that is not out does not do; gone when it gets its date."""

Section = tuple[str, dict[str, list[str]]]


def read_sections(text: str) -> list[Section]:
    """Every heading of a version with the lines below each of its kinds."""
    sections: list[Section] = []
    kind = ""
    for line in text.splitlines():
        if line.startswith("## "):
            sections.append((line, {}))
        elif sections and line.startswith("### "):
            kind = line.removeprefix("### ")
            assert kind not in sections[-1][1], f"{kind} is there twice"
            sections[-1][1][kind] = []
        elif sections and line.strip():
            assert kind in sections[-1][1], f"a line of no kind: {line}"
            sections[-1][1][kind].append(line)
    return sections


def check(text: str, version: str) -> None:
    """Fail where the form is broken."""
    found = []
    for i, (heading, kinds) in enumerate(read_sections(text)):
        match = HEADING.match(heading)
        assert match, f"{heading!r} is not '## VERSION - DATE'"
        found.append(match["version"])
        if match["date"] == "unreleased":
            assert i == 0, f"{heading} is not the newest"
        else:
            date.fromisoformat(match["date"])
            assert NOT_YET not in kinds, f"{heading}: what is not yet there belongs to no version that is out"
        named = [kind for kind in kinds if kind != NOT_YET]
        assert named == [kind for kind in KINDS if kind in named], f"{heading}: {named}, but kinds are {KINDS}"
        for kind, lines in kinds.items():
            assert lines, f"{heading}: {kind} is empty"
            assert all(line.startswith(("- ", "  ")) for line in lines), f"{heading}: {kind} is not a list"
    assert found[0] == version, f"the newest is {found[0]}, the source is {version}"
    assert sorted(found, key=Version, reverse=True) == found, f"versions are not newest first: {found}"


def test_the_changelog_keeps_its_form() -> None:
    check((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("## 1.0.0\n", "is not '## VERSION - DATE'"),
        ("## 1.0.0 - 2026-13-01\n### Added\n- x\n", "month must be in 1..12"),
        ("## 0.9.0 - unreleased\n### Added\n- x\n", "the source is 1.0.0"),
        ("## 1.0.0 - unreleased\n### Fixed\n- x\n### Added\n- x\n", "but kinds are"),
        ("## 1.0.0 - unreleased\n### News\n- x\n", "but kinds are"),
        ("## 1.0.0 - unreleased\n### Added\n", "Added is empty"),
        ("## 1.0.0 - unreleased\n### Added\nwords\n", "is not a list"),
        ("## 1.0.0 - 2026-01-01\n### Not yet\n- x\n", "belongs to no version that is out"),
        ("## 1.0.0 - 2026-01-01\n### Added\n- x\n## 1.1.0 - 2026-02-01\n### Added\n- x\n", "not newest first"),
        ("## 1.0.0 - 2026-01-01\n### Added\n- x\n## 0.9.0 - unreleased\n### Added\n- x\n", "is not the newest"),
    ],
)
def test_a_broken_form_is_found(text: str, complaint: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=re.escape(complaint)):
        check(text, "1.0.0")
