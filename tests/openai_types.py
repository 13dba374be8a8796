"""The `openai` package's own types as lists of paths, one for each field and each value of a few."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NotRequired, Required, TypeVar, Union, get_args, get_origin, get_type_hints

from openai.types import completion_create_params
from openai.types.chat import ParsedChatCompletionMessage
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from pydantic import BaseModel
from typing_extensions import is_typeddict

from openai_answer import Endpoint

TYPES: dict[Endpoint, Any] = {
    "chat": chat_create_params.CompletionCreateParamsStreaming,
    "completions": completion_create_params.CompletionCreateParamsStreaming,
}
_WRAPPERS = (Required, NotRequired, Annotated)
_LISTS = (list, Iterable, Sequence)
_PLAIN = (str, int, float, bool, object, type(None), Any)


def list_paths(endpoint: Endpoint) -> list[str]:
    """Every field of a route's request type, as the body nests."""
    return list(dict.fromkeys(_walk(TYPES[endpoint], "", ())))


def list_returned_paths() -> list[str]:
    """Every field of the messages that the client's helpers put together, which may be sent as the next request's."""
    found = [*_walk(ParsedChatCompletionMessage, "messages[]", ()), *_walk(ChoiceDelta, "messages[]", ())]
    return [path for path in dict.fromkeys(found) if "=" not in path]


def _walk(kind: Any, path: str, above: tuple[Any, ...]) -> Iterator[str]:
    origin, args = get_origin(kind), get_args(kind)
    origin = Iterable if origin in (Iterable, Sequence) else origin
    if origin in _WRAPPERS:
        yield from _walk(args[0], path, above)
    elif origin in (Union, types.UnionType):
        # beside `str` the values are only those that an editor proposes
        kinds = [arg for arg in args if str not in args or get_origin(arg) is not Literal]
        for arg in kinds:
            yield from _walk(arg, path, above)
    elif origin is Literal:
        yield from (f"{path}={value}" for value in args)
    elif origin in _LISTS:
        yield from _walk(args[0], f"{path}[]", above)
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield f"{path}.{name}"
            yield from _walk(field.annotation, f"{path}.{name}", above)
    elif is_typeddict(kind):
        if kind not in above:
            yield from _walk_fields(kind, path, (*above, kind))
    else:
        assert origin is dict or kind in _PLAIN or isinstance(kind, TypeVar), f"what is {kind} at {path}?"


def _walk_fields(kind: Any, path: str, above: tuple[Any, ...]) -> Iterator[str]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        below = f"{path}.{name}" if path else name
        yield below
        yield from _walk(hint, below, above)
