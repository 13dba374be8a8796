"""The gateway's settings, parsed once from the environment by the table that all parts share.

Secrets never appear in `repr`. Files that the gateway makes for itself lie in `data_dir`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from urllib.parse import urlsplit

from loraplex.errors import SettingsError
from loraplex_registry.wire.log import FORMATS, LEVELS
from loraplex_registry.wire.setting import SettingError, read_days, read_drain_s, read_pool_size, read_settings

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_IN_MEMORY = "memory://"
Network = IPv4Network | IPv6Network
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that the gateway process is told from outside."""

    database_url: str = field(repr=False)
    """LORAPLEX_DATABASE_URL; default a SQLite file in the data folder."""

    object_store_url: str
    """LORAPLEX_OBJECT_STORE_URL; default a folder in the data folder."""

    object_store_public_url: str | None = None
    """LORAPLEX_OBJECT_STORE_PUBLIC_URL: scheme and host in presigned URLs."""

    host: str = "127.0.0.1"
    port: int = 8080
    """LORAPLEX_LISTEN, HOST:PORT; port 0 takes a free one."""

    insecure_behind_proxy: bool = False
    """Listen on other than loopback addresses without TLS (command line only)."""

    trusted_proxies: tuple[Network, ...] = ()
    """LORAPLEX_TRUSTED_PROXIES: whose forwarding headers count."""

    data_dir: Path | None = None
    """LORAPLEX_DATA_DIR; holds admin.key, key.pepper and signing.pem unless these are given."""

    pools: str = "{}"
    """LORAPLEX_POOLS, JSON."""

    admin_key: str | None = field(default=None, repr=False)
    """LORAPLEX_ADMIN_KEY."""

    signing_key: str | None = field(default=None, repr=False)
    """LORAPLEX_SIGNING_KEY, PEM."""

    key_pepper: str | None = field(default=None, repr=False)
    """LORAPLEX_KEY_PEPPER."""

    engine_key: str | None = field(default=None, repr=False)
    """LORAPLEX_ENGINE_KEY; without it engines read no artifacts."""

    parity_gate: str = "when_available"
    """LORAPLEX_PARITY_GATE."""

    purge_after_days: int = 30
    """LORAPLEX_PURGE_AFTER_DAYS."""

    redis_url: str | None = field(default=None, repr=False)
    """LORAPLEX_REDIS_URL; None (memory://) where this is the only gateway."""

    database_pool_size: int = 8
    """LORAPLEX_DATABASE_POOL_SIZE: connections to Postgres, at most."""

    outcome_days: int = 30
    """LORAPLEX_OUTCOME_DAYS."""

    warm_s: float = 60.0
    """Seconds that engines keep content after its last name is gone: a rollback or restore finds it loaded."""

    log_level: str = "info"
    """LORAPLEX_LOG_LEVEL."""

    log_format: str | None = None
    """LORAPLEX_LOG_FORMAT; None: text to a terminal, else JSON."""

    drain_s: float = 30.0
    """LORAPLEX_DRAIN_S: seconds that running answers get after SIGTERM."""

    @property
    def has_company(self) -> bool:
        """Whether other gateways may run on the same database; a SQLite database has one at any time."""
        return self.redis_url is not None and not self.database_url.startswith("sqlite")


def load_settings(environ: Mapping[str, str]) -> Settings:
    """Return the gateway's settings.

    Raises:
        SettingsError: A name or value is not valid, or none says where the database is.
    """
    try:
        values = read_settings(environ, "gateway")
    except SettingError as error:
        raise SettingsError(error.message) from error
    _refuse_unbuilt(values)
    host, port = split_listen(values["listen"])
    data_dir = Path(values["data_dir"]).expanduser().resolve() if "data_dir" in values else None
    return Settings(
        database_url=values.get("database_url") or _in_data_dir(data_dir, "sqlite+aiosqlite:///{}/loraplex.db"),
        object_store_url=values.get("object_store_url") or _in_data_dir(data_dir, "file://{}/objects"),
        object_store_public_url=values.get("object_store_public_url"),
        host=host,
        port=port,
        trusted_proxies=read_networks(values.get("trusted_proxies", "")),
        data_dir=data_dir,
        pools=values.get("pools", "{}"),
        admin_key=values.get("admin_key"),
        signing_key=values.get("signing_key"),
        key_pepper=values.get("key_pepper"),
        engine_key=values.get("engine_key"),
        parity_gate=values["parity_gate"],
        purge_after_days=_read_days("LORAPLEX_PURGE_AFTER_DAYS", values["purge_after_days"]),
        redis_url=check_redis_url(values["redis_url"]),
        database_pool_size=_read_pool_size(values["database_pool_size"]),
        outcome_days=_read_days("LORAPLEX_OUTCOME_DAYS", values["outcome_days"]),
        log_level=_check_log_level(values["log_level"]),
        log_format=_check_log_format(values.get("log_format")),
        drain_s=_read_drain_s(values["drain_s"]),
    )


def split_listen(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; an IPv6 host stands in brackets.

    Raises:
        SettingsError: It is something else.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"LORAPLEX_LISTEN must be HOST:PORT, not {text!r}")
    return host, int(port)


def read_networks(text: str) -> tuple[Network, ...]:
    """Return the networks of LORAPLEX_TRUSTED_PROXIES, a list with commas; an address is a network of one.

    Raises:
        SettingsError: One is no network, or holds every address.
    """
    return tuple(_read_network(part.strip()) for part in text.split(",")) if text.strip() else ()


def _read_network(text: str) -> Network:
    try:
        network = ip_network(text)
    except ValueError:
        raise SettingsError(
            f"LORAPLEX_TRUSTED_PROXIES is a list of networks such as 10.8.0.0/16, fd00:8::/32, not {text!r}"
        ) from None
    if network.prefixlen == 0:
        raise SettingsError(f"LORAPLEX_TRUSTED_PROXIES: {text} is everybody; name the networks of your proxies")
    if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped is not None:
        raise SettingsError(f"LORAPLEX_TRUSTED_PROXIES: write {text} as a network of IPv4")
    return network


def check_exposure(settings: Settings) -> None:
    """Refuse to offer bearer keys in clear text to a network.

    Raises:
        SettingsError: The address is not loopback and no proxy is said to stand in front.
    """
    if settings.host not in _LOOPBACK and not settings.insecure_behind_proxy:
        raise SettingsError(
            f"LORAPLEX_LISTEN: {settings.host} is reachable from other machines, and TLS is not built yet; listen on "
            "127.0.0.1, or say --insecure-behind-proxy if a TLS proxy stands in front"
        )


def _in_data_dir(data_dir: Path | None, template: str) -> str:
    if data_dir is None:
        raise SettingsError("Set LORAPLEX_DATA_DIR, or both LORAPLEX_DATABASE_URL and LORAPLEX_OBJECT_STORE_URL")
    return template.format(data_dir)


def _refuse_unbuilt(values: Mapping[str, str]) -> None:
    if "registry_url" in values:
        raise SettingsError(
            "LORAPLEX_REGISTRY_URL: a gateway with a registry of its own process is not built yet; unset it for the "
            "gateway (engines need it: the gateway's own address)"
        )


def check_redis_url(text: str) -> str | None:
    """Return LORAPLEX_REDIS_URL, None for memory://.

    Raises:
        SettingsError: It is something else.
    """
    if text == _IN_MEMORY:
        return None
    if not text.startswith(_REDIS_SCHEMES):
        # it may hold a password
        raise SettingsError(f"LORAPLEX_REDIS_URL begins with {', '.join(_REDIS_SCHEMES)}, or is {_IN_MEMORY}")
    try:
        _ = urlsplit(text).port
    except ValueError:
        # its text may hold a part of the password
        raise SettingsError(
            "LORAPLEX_REDIS_URL must be redis://USER:PASSWORD@HOST:PORT/DB; in a password write @ as %40, "
            "/ as %2F and # as %23"
        ) from None
    return text


def _read_pool_size(text: str) -> int:
    try:
        return read_pool_size(text)
    except SettingError as error:
        raise SettingsError(error.message) from error


def _read_drain_s(text: str) -> float:
    try:
        return read_drain_s(text)
    except SettingError as error:
        raise SettingsError(error.message) from error


def _read_days(name: str, text: str) -> int:
    try:
        return read_days(name, text)
    except SettingError as error:
        raise SettingsError(error.message) from error


def _check_log_format(text: str | None) -> str | None:
    if text is not None and text not in FORMATS:
        raise SettingsError(f"LORAPLEX_LOG_FORMAT must be one of {', '.join(FORMATS)}, not {text!r}")
    return text


def _check_log_level(text: str) -> str:
    if text not in LEVELS:
        raise SettingsError(f"LORAPLEX_LOG_LEVEL must be one of {', '.join(LEVELS)}, not {text!r}")
    return text
