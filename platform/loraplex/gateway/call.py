"""An inference body as the gateway reads it: the names of all fields and the few that it needs, checked.

The rest goes on as it came; engines judge its values.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from loraplex.errors import InvalidRequestError
from loraplex_engine.wire.field import check_names
from loraplex_engine.wire.strict_json import decode_object

# The first of these that is given decides the canary bucket.
_CANARY_FIELDS = ("prompt_cache_key", "safety_identifier", "user")
_MAX_TAGS = 16
_MAX_TAG_KEY_LEN = 64
_MAX_TAG_LEN = 512


class Call(msgspec.Struct, frozen=True):
    """One inference request. `tags` is the client's `metadata`, kept in usage."""

    route: str
    model: str
    is_stream: bool
    canary_key: str | None
    tags: dict[str, str] | None
    fields: dict[str, Any]

    def encode_for(self, engine_model: str) -> bytes:
        """Return the body for an engine, which knows its base's name and digests only."""
        return json.dumps(self.fields | {"model": engine_model}, ensure_ascii=False, separators=(",", ":")).encode()


def parse_call(route: str, body: bytes) -> Call:
    """Read what the gateway needs of `body`; null is absent.

    Raises:
        InvalidJsonError: The body is not one strict JSON object.
        UnknownParameterError: Nobody knows a field.
        UnsupportedParameterError: A field is known elsewhere and not built here.
        InvalidRequestError: A field that the gateway reads is missing or of a wrong type.
    """
    fields = decode_object(body)
    check_names(route, fields)
    given = {name: value for name, value in fields.items() if value is not None}
    if "model" not in given:
        raise InvalidRequestError("model is required; GET /v1/models lists the names", param="model")
    for name in ("max_tokens", "max_completion_tokens", "n"):
        _check_type(given, name, int)
    _check_type(given, "stream", bool)
    _check_type(given, "model", str)
    return Call(
        route=route,
        model=given["model"],
        is_stream=given.get("stream", False),
        canary_key=next((given[name] for name in _CANARY_FIELDS if isinstance(given.get(name), str)), None),
        tags=_read_tags(given.get("metadata")),
        fields=fields,
    )


def _check_type(given: dict[str, Any], name: str, expected: type) -> None:
    # `type` and not isinstance: true is not a number here.
    if name in given and type(given[name]) is not expected:
        words = {int: "an integer", bool: "true or false", str: "a string"}
        raise InvalidRequestError(f"{name} must be {words[expected]}", param=name)


def _read_tags(metadata: Any) -> dict[str, str] | None:
    if metadata is None:
        return None
    if isinstance(metadata, dict):
        metadata = {name: value for name, value in metadata.items() if value is not None}
    is_valid = (
        isinstance(metadata, dict)
        and len(metadata) <= _MAX_TAGS
        and all(len(key) <= _MAX_TAG_KEY_LEN for key in metadata)
        and all(isinstance(value, str) and len(value) <= _MAX_TAG_LEN for value in metadata.values())
    )
    if not is_valid:
        raise InvalidRequestError(
            f"metadata is an object of up to {_MAX_TAGS} strings: keys up to {_MAX_TAG_KEY_LEN}, values up to "
            f"{_MAX_TAG_LEN} characters",
            param="metadata",
        )
    return dict(metadata)
