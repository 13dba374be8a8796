"""Errors that people read are sentences: a message begins with a capital, unless with a name of the API.

Nothing that is said names a page of this repository, which most readers do not have.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import loraplex.errors
import loraplex_registry.errors

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("platform/loraplex", "adapters_registry/loraplex_registry")
WORDS = {"a", "an", "each", "give", "make", "only", "send", "set", "the", "there", "this", "version"}
EMBEDDED = {"ArtifactError", "TokenError"}
"""Their messages end other sentences."""
ERRORS = {name for module in (loraplex.errors, loraplex_registry.errors) for name in vars(module) if "Error" in name}


def find_beginnings() -> Iterator[tuple[str, str]]:
    for source in SOURCES:
        for file in sorted((ROOT / source).rglob("*.py")):
            for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(call, ast.Call) and call.args and ast.unparse(call.func) in ERRORS - EMBEDDED:
                    first = call.args[0]
                    part = first.values[0] if isinstance(first, ast.JoinedStr) else first
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield f"{file.relative_to(ROOT)}:{call.lineno}", part.value


def test_messages_begin_with_a_capital() -> None:
    beginnings = list(find_beginnings())
    assert len(beginnings) > 50
    assert [(where, text) for where, text in beginnings if text.split(" ")[0] in WORDS] == []


def find_texts() -> Iterator[tuple[str, str]]:
    """Every text of the sources but docstrings of modules and what only tools of the repository say."""
    for source in (*SOURCES, "engine/loraplex_engine"):
        for file in sorted((ROOT / source).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            first = tree.body[0].value if tree.body and isinstance(tree.body[0], ast.Expr) else None
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node is not first:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", node.value


def test_nobody_is_sent_to_a_page_of_the_repository() -> None:
    texts = list(find_texts())
    assert len(texts) > 1000
    assert [(where, text) for where, text in texts if re.search(r"\bdocs/", text)] == []
