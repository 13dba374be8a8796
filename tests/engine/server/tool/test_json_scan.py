"""JSON checked by the character: accepts what `json` accepts, and stops at the first character that cannot belong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loraplex_engine.server.tool.json_scan import BrokenTextError, scan_value

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def scan(text: str) -> int | None:
    """Return how many characters an object or list takes, None if it is not complete."""
    state = scan_value(text[0])
    next(state)
    for position, char in enumerate(text[1:], 1):
        try:
            state.send(char)
        except StopIteration:
            return position + 1
    return None


@settings(deadline=None)
@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_what_json_writes_is_taken_to_its_end_and_not_before(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps({"a": value}, indent=indent, ensure_ascii=ascii_only)
    assert scan(text + " rest") == len(text)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("{'a'", 1),
        ('{"a": 01', 7),
        ('{"a" 1', 5),
        ('{"a": .5', 6),
        ('{"a": 1.}', 8),
        ('{"a": tru}', 9),
        ('{"a": "\n', 7),
        ('{"a": "\\x', 8),
        ('{"a": "\\u12g', 11),
        ('{"a": 1,}', 8),
        ("[1,]", 3),
        ("[1}", 2),
        ("[NaN", 1),
        ("[-a", 2),
        ("[1e]", 3),
        ("[" * 70, 65),
    ],
)
def test_the_first_character_that_cannot_belong_is_named(text: str, taken: int) -> None:
    state = scan_value(text[0])
    next(state)
    for char in text[1:taken]:
        state.send(char)
    with pytest.raises(BrokenTextError):
        state.send(text[taken])


@settings(deadline=None)
@given(st.text('{}[]":,0123456789.eE+-\\utrfalsn \n', min_size=1, max_size=12))
@example("[1 2]")
def test_it_agrees_with_json(tail: str) -> None:
    text = "[" + tail
    try:
        size = scan(text)
    except BrokenTextError:
        size = None
    ends = [end for end in range(2, len(text) + 1) if _is_json(text[:end])]
    assert size == (ends[0] if ends else None)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=pytest.fail)
    except json.JSONDecodeError:
        return False
    return True
