"""The flag `--limit NAME=NUMBER`, which tenants, keys and adapters share; the API knows the names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated

from cyclopts import Parameter

from loraplex.client.errors import ClientError

Limits = Annotated[list[str] | None, Parameter(name="--limit", negative=())]
_LIMIT = re.compile(r"([a-z][a-z_]*)=(?:none|([0-9]{1,18})(KiB|MiB|GiB|TiB)?)", re.ASCII)
_UNIT_TO_SHIFT = {None: 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


def read_limits(texts: Sequence[str] | None) -> dict[str, int | None] | None:
    """Return NAME=NUMBER texts as the API's limits; which names there are is for the API to say.

    Raises:
        ClientError: One is not NAME=NUMBER or NAME=none.
    """
    if not texts:
        return None
    limits: dict[str, int | None] = {}
    for text in texts:
        found = _LIMIT.fullmatch(text)
        if found is None:
            raise ClientError(
                f"{text!r} is not NAME=NUMBER, as tokens_per_minute=6000 or adapter_bytes=10GiB, nor NAME=none, which "
                "removes a limit.",
                code="invalid_request_error",
                param="limit",
            )
        name, number, unit = found.groups()
        limits[name] = None if number is None else int(number) << _UNIT_TO_SHIFT[unit]
    return limits


def show_limits(limits: Mapping[str, int | None]) -> list[str]:
    """Return limits as the flag takes them."""
    return [f"{name}={value}" for name, value in limits.items() if value is not None]
