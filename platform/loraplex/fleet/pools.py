"""LORAPLEX_POOLS: which engines there are, for which base or which full model. Pure parsing; knows no HTTP."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec

from loraplex.errors import SettingsError
from loraplex_registry.wire.naming import is_name

_URL = re.compile(r"(dns\+)?http://[A-Za-z0-9.\-\[\]:_]+(:\d+)?/?")


_MAX_PIN_LEN = 256


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name as in `model=` whose adapters are always loaded, on `copies` replicas of a pool; None: on each of them."""

    model: str
    copies: int | None = None


class Pool(msgspec.Struct, frozen=True):
    """Engines that are alike: `engines` are URLs, or `dns+http://name:port` for all addresses of a name.

    They serve a base with its adapters, or (`model` is its served name, `base` is empty) one full fine-tune and nothing
    else.
    """

    name: str
    base: str
    engines: tuple[str, ...]
    model: str | None = None
    pins: tuple[Pin, ...] = ()


def parse_pools(text: str) -> tuple[Pool, ...]:
    """Return the pools in `{"name": {"base": BASE, "engines": [URL, ...], "pin": [MODEL, ...]}}`.

    A pool for a full model has "model" in place of "base", and pins nothing. A pin is a name, or
    `{"model": NAME, "copies": NUMBER}`.

    Raises:
        SettingsError: The text is something else; the message names the pool.
    """
    try:
        raw = msgspec.json.decode(text, type=dict[str, dict[str, object]])
    except msgspec.MsgspecError as error:
        raise SettingsError(f"LORAPLEX_POOLS is not a JSON object of pools: {error}") from error
    pools = tuple(_parse_pool(name, fields) for name, fields in raw.items())
    _check_one_pool_each(pools)
    return pools


def _parse_pool(name: str, fields: dict[str, object]) -> Pool:
    if not is_name(name):
        raise SettingsError(f"LORAPLEX_POOLS: {name!r} is not a name of a-z, 0-9 and '-'")
    unknown = sorted(fields.keys() - {"base", "model", "engines", "pin"})
    if unknown:
        raise SettingsError(f"LORAPLEX_POOLS: {name} has unknown fields {', '.join(unknown)}")
    base, model, engines = fields.get("base"), fields.get("model"), fields.get("engines")
    if (base is None) == (model is None):
        raise SettingsError(f"LORAPLEX_POOLS: {name} needs either 'base' or 'model'")
    for kind, found in (("base", base), ("model", model)):
        if found is not None and not (isinstance(found, str) and is_name(found)):
            raise SettingsError(f"LORAPLEX_POOLS: {name}: '{kind}' is the served name of a model, of a-z, 0-9 and '-'")
    if not isinstance(engines, list) or not all(isinstance(url, str) and _is_address(url) for url in engines):
        raise SettingsError(f"LORAPLEX_POOLS: {name} needs 'engines', a list of http:// or dns+http:// URLs")
    urls = tuple(url.rstrip("/") for url in engines)
    pins = _parse_pins(name, fields.get("pin", []))
    if pins and model is not None:
        raise SettingsError(f"LORAPLEX_POOLS: {name} serves one full model, so there is nothing to pin")
    return Pool(name, str(base or ""), urls, None if model is None else str(model), pins)


def _is_address(url: str) -> bool:
    try:
        return _URL.fullmatch(url) is not None and urlsplit(url).port != 0
    except ValueError:
        # a port beyond 65535, or what stands in brackets and is no IPv6
        return False


def _parse_pins(pool: str, given: object) -> tuple[Pin, ...]:
    try:
        entries = msgspec.convert(given, list[str | Pin])
    except msgspec.ValidationError as error:
        raise SettingsError(
            f'LORAPLEX_POOLS: {pool}: \'pin\' is a list of names, or of {{"model": NAME, "copies": NUMBER}}: {error}'
        ) from error
    pins = tuple(Pin(entry) if isinstance(entry, str) else entry for entry in entries)
    for pin in pins:
        if not 0 < len(pin.model) <= _MAX_PIN_LEN or not pin.model.isprintable():
            raise SettingsError(f"LORAPLEX_POOLS: {pool} pins something that is no name")
        if pin.copies is not None and pin.copies < 1:
            raise SettingsError(f"LORAPLEX_POOLS: {pool} pins {pin.model} on {pin.copies} replicas; 1 is the least")
    if len({pin.model for pin in pins}) < len(pins):
        raise SettingsError(f"LORAPLEX_POOLS: {pool} pins a name twice")
    return pins


def _check_one_pool_each(pools: tuple[Pool, ...]) -> None:
    """An engine serves one model, so it is in one pool, once."""
    seen: dict[str, str] = {}
    for pool in pools:
        for url in pool.engines:
            if url in seen:
                raise SettingsError(f"LORAPLEX_POOLS: {url} is listed twice, in {seen[url]} and in {pool.name}")
            seen[url] = pool.name
