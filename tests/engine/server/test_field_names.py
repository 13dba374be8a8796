"""The judge of names that the gateway asks says what the engine says when it converts the body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_engine.errors import InvalidRequestError
from loraplex_engine.server.field.request import read_chat, read_completion, read_tokenize
from loraplex_engine.wire import field
from loraplex_engine.wire.openai import ChatRequest, CompletionRequest, TokenizeRequest

Read = Callable[[dict[str, Any]], Any]
MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, tuple[Read, type, Mapping[str, tuple[Any, ...]], dict[str, Any]]] = {
    "/v1/chat/completions": (read_chat, ChatRequest, field.NEUTRAL_CHAT, {"messages": MESSAGES}),
    "/v1/completions": (read_completion, CompletionRequest, field.NEUTRAL_COMPLETION, {"prompt": "hi"}),
    "/v1/tokenize": (read_tokenize, TokenizeRequest, field.NEUTRAL_TOKENIZE, {"prompt": "hi"}),
}
NAMES = sorted({*field.UNSUPPORTED, *field.NEUTRAL_CHAT, *field.NEUTRAL_COMPLETION, *field.NEUTRAL_TOKENIZE, "best_of"})
VALUES = [None, False, True, 0, 1, 2, "", "none", "auto", "medium", [], {}, ["text"]]


def ask(act: Callable[[], Any]) -> tuple[str, str | None, str] | None:
    try:
        act()
    except InvalidRequestError as error:
        return error.code, error.param, str(error)
    return None


@pytest.mark.parametrize("route", ROUTES)
@given(
    surplus=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=80), st.sampled_from(VALUES), max_size=3),
    n=st.sampled_from([None, 1, 2]),
)
def test_gateway_and_engine_refuse_the_same_names(route: str, surplus: dict[str, Any], n: int | None) -> None:
    read, kind, _, valid = ROUTES[route]
    surplus = {name: value for name, value in surplus.items() if name not in kind.__struct_fields__}
    body = {"model": "m", **valid, **surplus} | ({} if route == "/v1/tokenize" else {"n": n})
    assert ask(lambda: field.check_names(route, body)) == ask(lambda: read(dict(body)))


@pytest.mark.parametrize("route", ROUTES)
def test_no_field_of_a_route_and_no_neutral_value_is_refused_by_its_name(route: str) -> None:
    _, kind, neutral, _ = ROUTES[route]
    field.check_names(route, dict.fromkeys(kind.__struct_fields__, "whatever"))
    for name, values in neutral.items():
        for value in values:
            field.check_names(route, {name: value})
