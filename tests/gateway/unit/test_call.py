"""What the gateway reads of an inference body, and what it passes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loraplex.errors import InvalidRequestError
from loraplex.gateway.call import parse_call
from loraplex.gateway.inference import read_canary_key, read_timeout
from loraplex.gateway.problem import describe
from loraplex_engine.errors import EngineError

ROUTE = "/v1/chat/completions"


def parse(**fields: Any) -> Any:
    return parse_call(ROUTE, json.dumps({"model": "team-x", **fields}).encode())


def test_fields_pass_as_they_came_with_the_model_replaced() -> None:
    call = parse(messages=[{"role": "user", "content": "Grüße 🙂"}], temperature=0.1, unknown=None, n=10**30)
    sent = json.loads(call.encode_for("sha256:abc"))
    assert sent == {
        "model": "sha256:abc",
        "messages": [{"role": "user", "content": "Grüße 🙂"}],
        "temperature": 0.1,
        "unknown": None,
        "n": 10**30,
    }


def test_null_is_absent() -> None:
    assert parse(metadata={"a": None, "b": "c"}).tags == {"b": "c"}
    call = parse(stream=None, max_tokens=None, n=None, metadata=None, user=None)
    assert (call.is_stream, call.tags, call.canary_key) == (False, None, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", 1),
        ("stream", "true"),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_completion_tokens", []),
        ("n", "2"),
        ("model", 5),
        ("model", ["team-x"]),
        ("metadata", "x"),
        ("metadata", {"a": 1}),
        ("metadata", {str(i): "x" for i in range(17)}),
        ("metadata", {"k" * 65: "x"}),
    ],
)
def test_a_wrong_type_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"max_tokenz": 5}, "unknown_parameter", "max_tokenz"),
        ({"echo": True}, "unsupported_parameter", "echo"),
        ({"store": True, "nonsense": 1}, "unsupported_parameter", "store"),
    ],
)
def test_a_field_that_no_engine_takes_is_refused_here(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(EngineError) as caught:
        parse(**fields)
    problem = describe(caught.value)
    assert (problem.status, problem.code, problem.param) == (400, code, param)
    assert parse(echo=None, store=False, max_tokenz=None).fields["store"] is False


@pytest.mark.parametrize("body", [b"{}", b'{"model": null}'])
def test_a_missing_model_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_call(ROUTE, body)
    assert (caught.value.param, describe(caught.value).status) == ("model", 400)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"model": "a"',
        b'{"model": "\\ud83d"}',
        b'{"model": "a\\u0000"}',
        b'{"model": "\xff"}',
        b'\xef\xbb\xbf{"model": "a"}',
        b'{"model": "a", "model": "b"}',
        b'{"model": "a", "x": NaN}',
        b'{"model": "a", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    ],
)
def test_what_is_no_strict_json_is_refused_in_ascii(body: bytes) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the engine's wire owns the class, the code is the contract
        parse_call(ROUTE, body)
    problem = describe(caught.value)
    assert (problem.status, problem.code) == (400, "invalid_json")
    assert problem.message.isascii()


def test_the_first_canary_field_decides() -> None:
    assert parse(user="u", safety_identifier="s").canary_key == "s"
    assert parse(user="u", prompt_cache_key="p").canary_key == "p"
    assert parse(user=5).canary_key is None


def test_timeouts_are_bounded() -> None:
    assert read_timeout(None) == 600
    assert read_timeout("2.5") == 2.5
    assert read_timeout("99999") == 3600
    for text in ("0", "-1", "nan", "inf", "1e400", "abc", ""):
        with pytest.raises(InvalidRequestError):
            read_timeout(text)


def test_a_canary_key_is_taken_whole_or_refused() -> None:
    assert read_canary_key(None) is None
    assert read_canary_key("k" * 200) == "k" * 200
    for text in ("", "k" * 201, "a b", "\xe9"):
        with pytest.raises(InvalidRequestError, match="200 visible ASCII") as caught:
            read_canary_key(text)
        assert caught.value.param == "x-loraplex-canary-key"
