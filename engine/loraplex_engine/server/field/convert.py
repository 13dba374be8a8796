"""From a JSON object to a request type: nulls dropped, unknown fields judged, wrong types refused by name."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from loraplex_engine.errors import InvalidRequestError, UnknownParameterError, UnsupportedParameterError
from loraplex_engine.wire.field import UNSUPPORTED_WITHIN, Neutral, check_absent
from loraplex_engine.wire.misfit import find_misfit

_Request = TypeVar("_Request", bound=msgspec.Struct)
# fields whose own nulls are absent too, with the depth down to which; below lie schemas, whose nulls mean something
_NULL_DEPTHS = {
    "metadata": 1,
    "response_format": 2,
    "stream_options": 1,
    "structured_outputs": 1,
    "tool_choice": 5,
    # a list of objects that hold an object
    "tools": 3,
}


def convert(body: dict[str, Any], kind: type[_Request], neutral: Neutral) -> _Request:
    """Return `body` as `kind`.

    Raises:
        InvalidRequestError: A field is of a wrong type, missing, unknown or not built; `param` names it.
    """
    given = {name: drop_nulls(value, _NULL_DEPTHS.get(name, 0)) for name, value in body.items() if value is not None}
    known = kind.__struct_fields__
    for name in [name for name in given if name not in known]:
        check_absent(name, given.pop(name), neutral)
    try:
        request = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise refuse(error, given, kind) from error
    if not given["model"]:
        raise InvalidRequestError("`model` must not be empty.", param="model")
    return request


def refuse(error: msgspec.ValidationError, value: Any, kind: type) -> InvalidRequestError:
    """Return the refusal of a value that is no `kind`: the message names the whole path, `param` its first field."""
    misfit = find_misfit(error, value, kind)
    path = misfit.path or "body"
    if not misfit.is_unknown:
        return InvalidRequestError(f"`{path}` {misfit.reason}.", param=misfit.field)
    if path.rpartition(".")[2] in UNSUPPORTED_WITHIN:
        return UnsupportedParameterError(f"`{path}` is not supported here; leave it out.", param=misfit.field)
    return UnknownParameterError(f"Nobody knows the parameter `{path}`; check its spelling.", param=misfit.field)


def drop_nulls(value: Any, depth: int) -> Any:
    """Return `value` without the nulls of its objects, `depth` levels of objects and lists down."""
    if depth and isinstance(value, dict):
        return {name: drop_nulls(item, depth - 1) for name, item in value.items() if item is not None}
    if depth and isinstance(value, list):
        return [drop_nulls(item, depth - 1) for item in value]
    return value
