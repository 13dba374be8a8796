"""What one operation of the API is, as data: its address, what it takes, what it answers, how it refuses."""

from __future__ import annotations

from typing import Literal

import msgspec

from loraplex.openapi.schema import Schema

JSON = "application/json"


class Parameter(msgspec.Struct, frozen=True):
    """One parameter; those of the path are required. `is_joined`: a list, its items joined by commas."""

    name: str
    place: Literal["path", "query", "header"]
    schema: Schema
    description: str = ""
    is_required: bool = False
    is_joined: bool = False


class Body(msgspec.Struct, frozen=True):
    """What a request carries; one that is not required may be left out altogether."""

    schema: Schema
    media_type: str = JSON
    is_required: bool = True


class Answer(msgspec.Struct, frozen=True):
    """One way to succeed: status, what it means, its body (None: empty) and headers, of which some may be left out."""

    status: int
    description: str
    schema: Schema | None = None
    media_type: str = JSON
    headers: dict[str, Schema] = {}
    optional_headers: dict[str, Schema] = {}
    other_media: dict[str, Schema] = {}


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method at one path. `codes` are the refusals beyond those that every operation has; see `failure`.

    `is_open`: no key is needed.
    """

    method: Literal["get", "post", "put", "patch", "delete"]
    path: str
    name: str
    tag: str
    summary: str
    answers: tuple[Answer, ...]
    codes: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    body: Body | None = None
    is_open: bool = False
