from __future__ import annotations

import time

import pytest

from loraplex_engine.errors import InvalidJsonError, PayloadTooLargeError
from loraplex_engine.wire.strict_json import MAX_VALUES, decode_object
from loraplex_registry.peft.strict_json import MAX_DEPTH


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not strict JSON"),
        (b'{"a":', "not strict JSON"),
        (b'{"a":1} x', "not strict JSON"),
        (b"[1]", "JSON object"),
        (b'{"a":1,"a":1}', "appears twice"),
        ('{"ä":1,"ä":1}'.encode(), "appears twice"),
        (b'{"a":{"b":1,"b":2}}', "appears twice"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":1e999}', "too large"),
        (b'{"a":' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a":"\\ud83d"}', "surrogate"),
        (b'{"a":["\\udc00"]}', "surrogate"),
        (b'{"\\ud83d":1}', "surrogate"),
        (b'{"a":"\\u0000"}', "NUL"),
        (b'{"a":"\x00"}', "not strict JSON"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b"\xef\xbb\xbf{}", "not strict JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nest deeper"),
        (b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nest deeper"),
    ],
)
def test_what_is_not_strict_json_is_refused_with_its_reason(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidJsonError, match=reason) as refusal:
        decode_object(body)
    assert str(refusal.value).isascii()


def test_strict_json_is_read() -> None:
    body = '{"a": "\\ud83d\\ude00 é \U0001fae0", "b": [1, 2.5, null, true], "c": {}}'.encode()
    assert decode_object(body) == {"a": "\U0001f600 é \U0001fae0", "b": [1, 2.5, None, True], "c": {}}


def test_the_deepest_allowed_nesting_is_read() -> None:
    assert decode_object(b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}")


TOO_MANY = MAX_VALUES + 1


@pytest.mark.parametrize(
    "values",
    [b"1", b"[]", b"{}", b'""', b'{"a":[1,2]}', b'"\\"",[1]'],
)
def test_more_values_than_a_body_may_hold_are_refused_before_they_are_made(values: bytes) -> None:
    with pytest.raises(PayloadTooLargeError, match=str(MAX_VALUES)):
        decode_object(b'{"a":[' + b",".join([values] * TOO_MANY) + b"]}")


@pytest.mark.parametrize("text", [b"[,", b'\\",{', b"\\\\,,", b"::"])
def test_what_looks_like_values_in_a_text_is_not_counted(text: bytes) -> None:
    assert len(decode_object(b'{"a":"' + text * TOO_MANY + b'"}')["a"]) >= TOO_MANY


def test_pairs_count_four_times_as_much_as_other_values() -> None:
    pairs = [b'"%d":1' % index for index in range(MAX_VALUES // 4)]
    with pytest.raises(PayloadTooLargeError):
        decode_object(b'{"a":{' + b",".join(pairs) + b"}}")
    assert len(decode_object(b'{"a":{' + b",".join(pairs[2:]) + b"}}")["a"]) == len(pairs) - 2


def test_as_many_values_as_a_body_may_hold_are_read() -> None:
    # the body, its pair, the list and what is in it
    body = b'{"a":[' + b",".join([b"1"] * (MAX_VALUES - 6)) + b"]}"
    assert len(decode_object(body)["a"]) == MAX_VALUES - 6


@pytest.mark.parametrize("end", [b"", b"\\", b'"', b"\\\\"])
@pytest.mark.parametrize("unit", [b'[\\"', b'"",[', b"[,"])
def test_counting_a_body_without_an_end_takes_no_time(unit: bytes, end: bytes) -> None:
    started = time.perf_counter()
    with pytest.raises((InvalidJsonError, PayloadTooLargeError)):
        decode_object(b'{"a":"' + unit * (TOO_MANY * 4) + end)
    assert time.perf_counter() - started < 30
