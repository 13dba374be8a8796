"""The registry's settings, parsed once. Secrets never appear in `repr`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loraplex_registry.errors import SettingError, TokenError
from loraplex_registry.wire.identity import split_public_keys
from loraplex_registry.wire.log import FORMATS, LEVELS
from loraplex_registry.wire.setting import read_days, read_pool_size, read_settings

_PARITY_GATES = ("required", "when_available", "off")


@dataclass(frozen=True, kw_only=True)
class RegistrySettings:
    """What the registry is told from outside, as a library or as a process of its own."""

    database_url: str = field(repr=False)
    """LORAPLEX_DATABASE_URL: postgresql+psycopg://... or sqlite+aiosqlite:///..."""

    object_store_url: str
    """LORAPLEX_OBJECT_STORE_URL: file:///FOLDER or s3://BUCKET/PREFIX?endpoint=..."""

    object_store_public_url: str | None = None
    """LORAPLEX_OBJECT_STORE_PUBLIC_URL: scheme and host in presigned URLs; default the store's own."""

    scratch_dir: Path | None = None
    """Where uploads lie on their way to S3: `scratch` in LORAPLEX_DATA_DIR, else in the system's temporary folder."""

    engine_key: str | None = field(default=None, repr=False)
    """LORAPLEX_ENGINE_KEY; without it engines need a signed token to read artifacts."""

    parity_gate: str = "when_available"
    """LORAPLEX_PARITY_GATE: required, when_available or off."""

    parity_patience_s: float = 60.0
    """Under when_available: how long a version waits for an engine that went away before it is ready unmeasured."""

    database_pool_size: int = 8
    """LORAPLEX_DATABASE_POOL_SIZE: connections to Postgres, at most."""

    purge_after_days: int = 30
    """LORAPLEX_PURGE_AFTER_DAYS: how long what was retired or deleted can be restored, days."""

    max_upload_bytes: int = 512 << 20
    """Largest multipart body."""

    check_timeout_s: float = 30.0
    """Default of `?wait=`: how long an upload waits for its verdict."""

    max_checks: int = 2
    """Uploads checked at once; others queue."""

    sweep_interval_s: float = 600.0
    """Time between two sweeps of the store."""

    orphan_grace_s: float = 3600.0
    """Age below which an object without a row, or staging, is left alone."""

    @property
    def is_gated(self) -> bool:
        """Whether versions are compared with their files, and served by nothing that they were not compared on."""
        return self.parity_gate != "off"

    def __post_init__(self) -> None:
        if self.parity_gate not in _PARITY_GATES:
            raise SettingError(
                f"LORAPLEX_PARITY_GATE is required, when_available or off, not {self.parity_gate!r}",
                param="LORAPLEX_PARITY_GATE",
            )


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a registry process needs besides: where it listens and whose tokens it accepts."""

    registry: RegistrySettings
    host: str
    port: int
    verify_keys: tuple[bytes, ...]
    """LORAPLEX_VERIFY_KEYS: public keys in PEM."""

    log_level: str = "info"
    """LORAPLEX_LOG_LEVEL."""

    log_format: str | None = None
    """LORAPLEX_LOG_FORMAT; None: text to a terminal, else JSON."""


def load_settings(environ: Mapping[str, str]) -> ServerSettings:
    """Return the settings of a registry process.

    Raises:
        SettingError: A name or value is not valid, or one that is needed is absent.
    """
    values = read_settings(environ, "registry")
    host, port = _split_listen(values["listen"])
    return ServerSettings(
        registry=RegistrySettings(
            database_url=values.get("database_url") or _in_data_dir(values, "sqlite+aiosqlite:///{}/loraplex.db"),
            object_store_url=values.get("object_store_url") or _in_data_dir(values, "file://{}/objects"),
            object_store_public_url=values.get("object_store_public_url"),
            scratch_dir=Path(_in_data_dir(values, "{}/scratch")) if "data_dir" in values else None,
            engine_key=values.get("engine_key"),
            parity_gate=values["parity_gate"],
            database_pool_size=read_pool_size(values["database_pool_size"]),
            purge_after_days=read_days("LORAPLEX_PURGE_AFTER_DAYS", values["purge_after_days"]),
        ),
        host=host,
        port=port,
        verify_keys=_split_keys(values.get("verify_keys", "")),
        log_level=_check_choice("LORAPLEX_LOG_LEVEL", values.get("log_level"), LEVELS) or "info",
        log_format=_check_choice("LORAPLEX_LOG_FORMAT", values.get("log_format"), FORMATS),
    )


def _check_choice(name: str, text: str | None, known: Sequence[str]) -> str | None:
    if text is not None and text not in known:
        raise SettingError(f"{name} must be one of {', '.join(known)}, not {text!r}")
    return text


def _split_keys(text: str) -> tuple[bytes, ...]:
    try:
        return split_public_keys(text)
    except TokenError as error:
        raise SettingError(f"LORAPLEX_VERIFY_KEYS {error.message}") from error


def _in_data_dir(values: Mapping[str, str], template: str) -> str:
    if "data_dir" not in values:
        raise SettingError("Set LORAPLEX_DATA_DIR, or both LORAPLEX_DATABASE_URL and LORAPLEX_OBJECT_STORE_URL")
    return template.format(Path(values["data_dir"]).expanduser().resolve())


def _split_listen(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise SettingError(f"LORAPLEX_LISTEN must be HOST:PORT, not {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)
