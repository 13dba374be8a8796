"""The threat model names files and tests that exist, and each attack has code and a proof."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "threat-model.md"
TEXT = PAGE.read_text(encoding="utf-8")
ADVERSARIES = (
    "A tenant against another tenant",
    "A tenant against the platform",
    "A leaked key",
    "A hostile adapter",
    "A hostile template, schema or grammar",
    "A hostile client",
    "A compromised engine",
    "A compromised registry or store",
    "A malicious administrator",
    "The supply chain",
)
_PROOF = re.compile(r"\[(test_\w+\.py)\]\(\.\./(tests/[\w/]+\.py)\)((?:\s*`test_\w+`)+)")
_CODE = re.compile(r"`((?:platform|engine|adapters_registry|scripts|requirements)/[\w./-]+)`")


def _list_tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


PROOFS = [(place, name) for _, place, names in _PROOF.findall(TEXT) for name in re.findall(r"test_\w+", names)]


@pytest.mark.parametrize(("place", "name"), PROOFS)
def test_a_test_that_is_named_exists(place: str, name: str) -> None:
    assert (ROOT / place).is_file(), place
    assert name in _list_tests(ROOT / place)


@pytest.mark.parametrize("place", sorted(set(_CODE.findall(TEXT))))
def test_code_that_is_named_exists(place: str) -> None:
    assert (ROOT / place).is_file()


def test_every_adversary_has_attacks_and_every_attack_its_code_and_proof() -> None:
    sections = dict(re.findall(r"^## ([^\n]+)\n\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
    assert tuple(sections) == ADVERSARIES
    for name, section in sections.items():
        attacks = [part for part in section.split("\n\n") if part.startswith("**")]
        assert attacks, name
        for attack in attacks:
            # what nothing stands against says so itself
            is_proven = "\nCode: " in attack and "\nProof: " in attack
            assert is_proven or attack.startswith("**A compromised gateway**"), attack[:80]
            assert not is_proven or (_CODE.search(attack) and _PROOF.search(attack)), attack[:80]
    assert len(PROOFS) == len(re.findall(r"`test_\w+`", TEXT)), "a test stands behind no link"
