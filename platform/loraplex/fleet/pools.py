"""LORAPLEX_POOLS: which engines there are, for which base. Pure parsing; knows no HTTP."""

from __future__ import annotations

import re

import msgspec

from loraplex.errors import SettingsError
from loraplex_registry.wire.naming import is_name

_URL = re.compile(r"(dns\+)?http://[A-Za-z0-9.\-\[\]:_]+(:\d+)?/?")


class Pool(msgspec.Struct, frozen=True):
    """Engines that are alike: `engines` are URLs, or `dns+http://name:port` for all addresses of a name."""

    name: str
    base: str
    engines: tuple[str, ...]


def parse_pools(text: str) -> tuple[Pool, ...]:
    """Return the pools in `{"name": {"base": BASE, "engines": [URL, ...]}}`.

    Raises:
        SettingsError: The text is something else; the message names the pool.
    """
    try:
        raw = msgspec.json.decode(text, type=dict[str, dict[str, object]])
    except msgspec.MsgspecError as error:
        raise SettingsError(f"LORAPLEX_POOLS is not a JSON object of pools: {error}") from error
    return tuple(_parse_pool(name, fields) for name, fields in raw.items())


def _parse_pool(name: str, fields: dict[str, object]) -> Pool:
    if not is_name(name):
        raise SettingsError(f"LORAPLEX_POOLS: {name!r} is not a name of a-z, 0-9 and '-'")
    if "model" in fields:
        raise SettingsError(f"LORAPLEX_POOLS: {name} serves a full model, which is not built yet; give 'base'")
    unknown = sorted(fields.keys() - {"base", "engines"})
    if unknown:
        raise SettingsError(f"LORAPLEX_POOLS: {name} has unknown fields {', '.join(unknown)}")
    base, engines = fields.get("base"), fields.get("engines")
    if not isinstance(base, str) or not is_name(base):
        raise SettingsError(f"LORAPLEX_POOLS: {name} needs 'base', the served name of a base model")
    if not isinstance(engines, list) or not all(isinstance(url, str) and _URL.fullmatch(url) for url in engines):
        raise SettingsError(f"LORAPLEX_POOLS: {name} needs 'engines', a list of http:// or dns+http:// URLs")
    return Pool(name, base, tuple(url.rstrip("/") for url in engines))
