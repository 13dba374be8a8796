"""Names and their grammar: tenants, adapters, aliases, served bases, and database constraints."""

from __future__ import annotations

import re

from loraplex_registry.errors import InvalidNameError

__all__ = [
    "ALIAS_PATTERN",
    "METADATA_NAMING",
    "NAME_PATTERN",
    "InvalidNameError",
    "check_alias_name",
    "check_name",
    "is_alias_name",
    "is_name",
    "served_name",
]
NAME_PATTERN = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
ALIAS_PATTERN = r"[a-z][a-z0-9-]{0,31}"
METADATA_NAMING = {
    "ix": "ix_%(column_0_N_label)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
_NAME = re.compile(NAME_PATTERN)
_ALIAS = re.compile(ALIAS_PATTERN)
_MAX_SERVED_LEN = 63


def is_name(text: str) -> bool:
    """Say whether `text` may name a tenant or an adapter, exactly as it stands."""
    return _NAME.fullmatch(text) is not None


def check_name(text: str, kind: str = "name") -> str:
    """Return `text` if it may name a tenant or an adapter; nothing is trimmed or folded.

    Args:
        text: The name as the client sent it.
        kind: What it names, for the message and for the error's `param`.

    Raises:
        InvalidNameError: It is not 1 to 63 of a-z, 0-9 and '-', bounded by a letter or digit.
    """
    if not is_name(text):
        raise InvalidNameError(
            f"{kind} is 1 to 63 of a-z, 0-9 and '-', and starts and ends with a letter or digit", param=kind
        )
    return text


def is_alias_name(text: str) -> bool:
    """Say whether `text` may name an alias; a number never does, so `@3` is always a version."""
    return _ALIAS.fullmatch(text) is not None


def check_alias_name(text: str) -> str:
    """Return `text` if it may name an alias.

    Raises:
        InvalidNameError: It is not a letter followed by up to 31 of a-z, 0-9 and '-'.
    """
    if not is_alias_name(text):
        raise InvalidNameError("An alias is a letter a-z and up to 31 of a-z, 0-9 and '-'", param="alias")
    return text


def served_name(spec: str) -> str:
    """Return the name under which a base given as `spec` (folder, hub id or .gguf file) is served.

    The last path part, lower-cased, `.gguf` dropped, other characters to '-', runs merged, 63 at most.

    Raises:
        InvalidNameError: Nothing is left of it.
    """
    last = spec.replace("\\", "/").rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf")
    name = re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:_MAX_SERVED_LEN].rstrip("-")
    if not name:
        raise InvalidNameError(f"no name can be made from {spec!r}; give --served-model-name", param="base")
    return name
