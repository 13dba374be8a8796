from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_registry.peft.errors import JsonError
from loraplex_registry.peft.strict_json import MAX_DEPTH, check_values, parse_json

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab é😀"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz"), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"r": 8, "r": 64}', "appears twice"),
        (b'{"a": {"b": 1, "b": 1}}', "appears twice"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ("{}".encode("utf-16"), "byte order mark"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b"[" * 100_000 + b"]" * 100_000, "nest deeper"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nest deeper"),
        (b'{"a": "\\ud83d"}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'{"a": "\\u0000"}', "NUL"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": 1,}', "line 1"),
        (b"{} {}", "line 1"),
        (b"", "line 1"),
        (b"{'a': 1}", "line 1"),
    ],
)
def test_text_that_readers_understand_differently_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(JsonError, match=says):
        parse_json(data)


def test_an_escaped_surrogate_pair_is_one_character() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@given(JSON_VALUES)
def test_ordinary_json_reads_as_the_standard_library_reads_it(value: object) -> None:
    assert parse_json(json.dumps(value).encode()) == value


@given(st.binary(max_size=200) | st.text('{}[]",:\\u0dnull-1e+ \x00').map(str.encode))
def test_any_bytes_parse_or_raise_the_module_s_own_error(data: bytes) -> None:
    with contextlib.suppress(JsonError):
        found = parse_json(data)
        assert found == json.loads(data)
        check_values(found)


@pytest.mark.parametrize("content", [b"", b"1", b'"\\n"'])
@pytest.mark.parametrize("depth", range(MAX_DEPTH - 2, MAX_DEPTH + 2))
def test_depth_is_judged_by_the_values_however_it_is_found_out(depth: int, content: bytes) -> None:
    data = b"[" * depth + content + b"]" * depth
    try:
        parse_json(data)
    except JsonError:
        with pytest.raises(JsonError):
            check_values(json.loads(data))
    else:
        check_values(json.loads(data))
