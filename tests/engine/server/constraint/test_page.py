"""The page about structured output names the keywords and limits that the code has."""

from __future__ import annotations

import re
from pathlib import Path

from loraplex_engine.server.constraint import field, keyword, schema

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "structured-output.md").read_text(encoding="utf-8")


def row(first: str) -> set[str]:
    found = re.search(rf"^\| {first} \| (.*) \|$", PAGE, re.MULTILINE)
    assert found is not None
    return set(re.findall(r"`([$\w]+)`", found[1]))


def test_keywords_are_those_of_the_table() -> None:
    assert row("enforced") == keyword.ENFORCED
    assert row("change nothing") == keyword.ANNOTATIONS
    assert row("refused") - {"contains"} <= keyword.HINTS.keys()
    assert (
        set(re.findall(r"`([\w-]+)`", PAGE.split("`format` is one of")[1].split(". `date` allows")[0]))
        == keyword.FORMATS
    )


def test_limits_are_those_of_the_code() -> None:
    assert f"{field.MAX_SCHEMA_BYTES // 1024} KiB of JSON, {schema.MAX_SCHEMA_NODES:,} schemas" in PAGE
    assert f"{schema.MAX_SCHEMA_DEPTH} levels, {schema.MAX_ENUM_VALUES:,} values" in PAGE
    assert f"1 to {schema.MAX_PATTERN_CHARS} characters in the syntax" in PAGE
    assert f"Up to {field.MAX_CHOICE_COUNT:,}\nchoices have {field.MAX_CHOICE_CHARS:,} characters" in PAGE
    assert f"A grammar has up to {field.MAX_GRAMMAR_CHARS:,} characters" in PAGE
