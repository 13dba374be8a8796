"""The gateway's settings, parsed once from the environment by the table that all parts share.

Secrets never appear in `repr`. Files that the gateway makes for itself lie in `data_dir`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.errors import SettingsError
from loraplex_registry.wire.setting import SettingError, read_settings

_DEFAULT_LISTEN = "127.0.0.1:8080"
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that the gateway process is told from outside."""

    database_url: str = field(repr=False)
    """LORAPLEX_DATABASE_URL; default a SQLite file in the data folder."""

    object_store_url: str
    """LORAPLEX_OBJECT_STORE_URL; default a folder in the data folder."""

    host: str = "127.0.0.1"
    port: int = 8080
    """LORAPLEX_LISTEN, HOST:PORT; port 0 takes a free one."""

    insecure_behind_proxy: bool = False
    """Listen on other than loopback addresses without TLS (command line only)."""

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

    log_level: str = "info"
    """LORAPLEX_LOG_LEVEL."""

    drain_s: float = 30.0
    """Seconds that running answers get after SIGTERM."""


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
    host, port = split_listen(values.get("listen", _DEFAULT_LISTEN))
    data_dir = Path(values["data_dir"]).expanduser().resolve() if "data_dir" in values else None
    return Settings(
        database_url=values.get("database_url") or _in_data_dir(data_dir, "sqlite+aiosqlite:///{}/loraplex.db"),
        object_store_url=values.get("object_store_url") or _in_data_dir(data_dir, "file://{}/objects"),
        host=host,
        port=port,
        data_dir=data_dir,
        pools=values.get("pools", "{}"),
        admin_key=values.get("admin_key"),
        signing_key=values.get("signing_key"),
        key_pepper=values.get("key_pepper"),
        engine_key=values.get("engine_key"),
        parity_gate=values.get("parity_gate", "when_available"),
        log_level=_check_log_level(values.get("log_level", "info")),
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
    if values.get("redis_url", "memory://") != "memory://":
        raise SettingsError("LORAPLEX_REDIS_URL: only memory:// is built yet; run one gateway and unset it")


def _check_log_level(text: str) -> str:
    if text not in _LOG_LEVELS:
        raise SettingsError(f"LORAPLEX_LOG_LEVEL must be one of {', '.join(_LOG_LEVELS)}, not {text!r}")
    return text
