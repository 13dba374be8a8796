"""The list of acts by which events can be asked for has all that any part writes, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from loraplex.audit.action import ACTIONS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("platform/loraplex", "adapters_registry/loraplex_registry")
KINDS = {name.partition(".")[0] for name in ACTIONS}
COMPOSED = {"alias", "fleet"}
"""Kinds whose names are put together where an event is written."""
OTHER = {"base.json", "key.pepper"}
"""Texts that look like acts and are none."""


def find_names() -> Iterator[str]:
    """Every text of the sources that looks like an act of a kind that there is."""
    for source in SOURCES:
        for file in sorted((ROOT / source).rglob("*.py")):
            if file.name == "action.py":
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    kind, _, act = node.value.partition(".")
                    if kind in KINDS and re.fullmatch(r"(?!html$)[a-z_]{3,}", act):
                        yield node.value


def test_every_act_that_a_source_names_can_be_asked_for() -> None:
    assert set(find_names()) - OTHER - ACTIONS == set()


def test_every_act_that_can_be_asked_for_is_written_somewhere() -> None:
    named = set(find_names())
    assert {name for name in ACTIONS - named if name.partition(".")[0] not in COMPOSED} <= {
        "base.weights_changed",
        "session.closed",
        "session.opened",
    }


def test_acts_of_the_fleet_are_those_of_its_page() -> None:
    page = (ROOT / "docs" / "fleet-differences.md").read_text(encoding="utf-8")
    assert {name for name in ACTIONS if name.startswith("fleet.")} == set(re.findall(r"`(fleet\.[a-z_]+)`", page))
