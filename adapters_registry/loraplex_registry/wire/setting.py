"""The one table of `LORAPLEX_*` settings of all parts, and its reader.

A part reads the names that are its own; a name that is nearly one of the table is fatal, any other unknown one is
logged. Each `X` may be given as `X_FILE`, a path to a file that holds the value. `find_setting` says of one setting
what holds and why; all that reads or shows settings goes through it.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from loraplex_registry.errors import SettingError

__all__ = [
    "PARTS",
    "PREFIX",
    "SETTINGS",
    "FoundSetting",
    "Setting",
    "SettingError",
    "UnknownSetting",
    "check_names",
    "find_setting",
    "find_unknown",
    "mask",
    "mask_passwords",
    "read_days",
    "read_drain_s",
    "read_pool_size",
    "read_settings",
]
PREFIX = "LORAPLEX_"
_INJECTED_BY_KUBERNETES = re.compile(r".*_SERVICE_HOST|.*_PORT(_.*)?|.*_SERVICE_PORT(_.*)?")
_OF_TESTS = tuple(f"{PREFIX}TEST_{name}" for name in ("PG", "REDIS", "REQUIRE", "CASES", "LONG"))
"""Read by the project's tests alone; a part that runs under them has nothing to say about them."""

_PASSWORD_IN_URL = re.compile(r"([a-z][a-z0-9+.-]*://[^\s:@/'\"]*:)[^\s'\"]*@", re.IGNORECASE)
# to the last @, since a password may hold whatever should have been encoded
_SECRET_IN_URL = re.compile(r"(://[^:@/]*:).*@", re.DOTALL)
_SECRET_PARAMETER = re.compile(
    r"([?&](?:\w*password|passwd|pwd|\w*secret\w*|\w*token|api_?key|access_?key)=)[^&\s'\"]*", re.IGNORECASE
)
_MAX_POOL_SIZE = 1000
_MAX_DRAIN_S, _MAX_DRAIN_LEN = 3600.0, 10
_MAX_TYPO_DISTANCE = 2
_MAX_DAYS, _MAX_DAYS_LEN = 36_500, 5
_log = logging.getLogger(__name__)


class Setting(msgspec.Struct, frozen=True):
    """One setting: full name, the parts that read it, meaning with unit, default text.

    `part_to_default` has the default of a part where it is another than `default`. Where there is no default,
    `otherwise` says in words what holds. `is_secret` values are never printed; one that is not built yet is refused by
    the parts that will read it. `reloads` are the parts that read it anew on SIGHUP; others read it when they start.
    """

    name: str
    parts: tuple[str, ...]
    meaning: str
    default: str | None = None
    is_secret: bool = False
    is_built: bool = True
    part_to_default: dict[str, str] = {}
    otherwise: str = ""
    reloads: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The key under which `read_settings` returns it: without prefix, lower-case."""
        return self.name.removeprefix(PREFIX).lower()

    def default_of(self, part: str) -> str | None:
        """Return the default text for `part`, None if there is none."""
        return self.part_to_default.get(part, self.default)


class FoundSetting(msgspec.Struct, frozen=True):
    """What holds for a setting in one part: its text (None: nothing), where that came from, and from which file."""

    setting: Setting
    value: str | None
    source: Literal["flag", "environment", "file", "default", "none"]
    path: str | None = None

    def __repr__(self) -> str:
        """Name the setting and its source, and no secret."""
        shown = None if self.value is None else mask(self.setting, self.value)
        return f"FoundSetting({self.setting.name}, {shown!r}, {self.source})"


class UnknownSetting(msgspec.Struct, frozen=True):
    """A `LORAPLEX_*` name that is no setting; `nearest` is the one that it resembles, and `is_fatal` a typo of it."""

    name: str
    nearest: str | None
    is_fatal: bool


PARTS = ("gateway", "registry", "engine", "up", "client")
_GATEWAY, _REGISTRY, _ENGINE, _UP, _CLIENT = PARTS
_SERVERS = (_GATEWAY, _REGISTRY, _ENGINE, _UP)
_CONTROL = (_GATEWAY, _REGISTRY, _UP)


def _engine_flag(name: str, meaning: str, default: str | None = None, otherwise: str = "") -> Setting:
    return Setting(f"{PREFIX}ENGINE_{name}", (_ENGINE, _UP), meaning, default, otherwise=otherwise)


def _secret(
    name: str, parts: tuple[str, ...], meaning: str, default: str | None = None, otherwise: str = ""
) -> Setting:
    return Setting(name, parts, meaning, default, is_secret=True, otherwise=otherwise)


def _later(name: str, parts: tuple[str, ...], meaning: str) -> Setting:
    return Setting(name, parts, meaning, is_built=False)


_IN_DATA_DIR = "{} in LORAPLEX_DATA_DIR"
SETTINGS: tuple[Setting, ...] = (
    Setting("LORAPLEX_URL", (_CLIENT,), "Where the command line finds the gateway", "http://127.0.0.1:8080"),
    _secret("LORAPLEX_API_KEY", (_CLIENT,), "The key with which the command line calls"),
    _secret(
        "LORAPLEX_ADMIN_KEY",
        (_GATEWAY, _UP),
        "The bootstrap admin key; made on first start if absent",
        otherwise=_IN_DATA_DIR.format("admin.key"),
    ),
    Setting(
        "LORAPLEX_LISTEN",
        _SERVERS,
        "Address to listen on, HOST:PORT",
        part_to_default={
            _GATEWAY: "127.0.0.1:8080",
            _UP: "127.0.0.1:8080",
            _REGISTRY: "127.0.0.1:8081",
            _ENGINE: "127.0.0.1:8100",
        },
    ),
    _later("LORAPLEX_PUBLIC_URL", (_GATEWAY, _UP), "The address clients use, for links"),
    Setting(
        "LORAPLEX_DATA_DIR",
        (*_CONTROL, _CLIENT),
        "Folder of database, objects and keys of one machine",
        otherwise="for up and client ~/.local/share/loraplex",
    ),
    Setting(
        "LORAPLEX_CACHE_DIR", (*_SERVERS, _CLIENT), "Machine-wide cache of bases and built code", "~/.cache/loraplex"
    ),
    _secret(
        "LORAPLEX_DATABASE_URL",
        _CONTROL,
        "postgresql+psycopg://... or sqlite+aiosqlite:///..., may hold a password",
        otherwise=_IN_DATA_DIR.format("loraplex.db"),
    ),
    Setting(
        "LORAPLEX_DATABASE_POOL_SIZE", _CONTROL, "Connections to Postgres that gateway and registry each keep", "8"
    ),
    Setting(
        "LORAPLEX_OBJECT_STORE_URL",
        _CONTROL,
        "file:///FOLDER or s3://bucket/prefix?endpoint=...",
        otherwise=_IN_DATA_DIR.format("objects"),
    ),
    Setting(
        "LORAPLEX_OBJECT_STORE_PUBLIC_URL",
        _CONTROL,
        "Scheme and host in presigned URLs, where clients use another",
        otherwise="the store's own",
    ),
    _secret("LORAPLEX_REDIS_URL", (_GATEWAY, _UP), "redis://... or memory://", "memory://"),
    Setting("LORAPLEX_REGISTRY_URL", (_GATEWAY, _ENGINE), "Where gateway and engine find a registry of its own"),
    Setting(
        "LORAPLEX_POOLS",
        (_GATEWAY, _UP),
        "JSON: {name: {base|model, engines: [URL | dns+http://name:port], pin: [MODEL]}}",
        otherwise="no engines; for up its own",
        reloads=(_GATEWAY,),
    ),
    _secret(
        "LORAPLEX_SIGNING_KEY",
        (_GATEWAY, _UP),
        "Private Ed25519 key in PEM that signs identities",
        otherwise=_IN_DATA_DIR.format("signing.pem"),
    ),
    Setting(
        "LORAPLEX_VERIFY_KEYS",
        (_REGISTRY, _ENGINE),
        "Public Ed25519 keys in PEM, one after another or as a JSON list",
        reloads=(_REGISTRY, _ENGINE),
    ),
    _secret("LORAPLEX_ENGINE_KEY", (*_CONTROL, _ENGINE), "With this engines read artifacts"),
    _secret(
        "LORAPLEX_KEY_PEPPER",
        (_GATEWAY, _UP),
        "Secret with which API keys are hashed",
        otherwise=_IN_DATA_DIR.format("key.pepper"),
    ),
    Setting("LORAPLEX_PARITY_GATE", _CONTROL, "required, when_available or off", "when_available"),
    Setting("LORAPLEX_PURGE_AFTER_DAYS", _CONTROL, "Days in which retired versions can be restored", "30"),
    Setting("LORAPLEX_OUTCOME_DAYS", (_GATEWAY, _UP), "Days that outcome counts of versions are kept", "30"),
    _later("LORAPLEX_CORS_ORIGINS", (_GATEWAY, _UP), "Origins that browsers may call from, with commas"),
    Setting(
        "LORAPLEX_TRUSTED_PROXIES",
        (_GATEWAY, _UP),
        "Networks of proxies whose X-Forwarded-For and X-Forwarded-Proto count, with commas",
        otherwise="none",
    ),
    _later("LORAPLEX_TLS_CERT", (_GATEWAY, _UP), "Certificate file in PEM"),
    _later("LORAPLEX_TLS_KEY", (_GATEWAY, _UP), "Key file of the certificate in PEM"),
    _later("LORAPLEX_METRICS_LISTEN", (_GATEWAY, _UP), "Address for /metrics alone, HOST:PORT"),
    Setting("LORAPLEX_DRAIN_S", (_GATEWAY, _ENGINE, _UP), "Seconds that running answers get after SIGTERM", "30"),
    Setting(
        "LORAPLEX_LOG_LEVEL",
        _SERVERS,
        "debug, info, warning or error",
        "info",
        reloads=(_GATEWAY, _REGISTRY, _ENGINE),
    ),
    Setting("LORAPLEX_LOG_FORMAT", _SERVERS, "text or json", otherwise="text to a terminal and from up, else json"),
    Setting("LORAPLEX_NATIVE", (_ENGINE, _UP), "0 uses the torch forms instead of compiled code", "1"),
    Setting(
        "LORAPLEX_TEST_HOOKS", (_ENGINE, _UP), "1 opens routes for tests on an engine that listens on loopback", "0"
    ),
    _engine_flag("MAX_MODEL_LEN", "Longest prompt plus answer, tokens", otherwise="the base's"),
    _engine_flag("MAX_NUM_SEQS", "Requests that run at once", "16"),
    _engine_flag("MAX_QUEUED_REQUESTS", "Requests that wait for their turn, at most", "1024"),
    _engine_flag("MAX_NUM_BATCHED_TOKENS", "Tokens computed in one step, at most", "2048"),
    _engine_flag(
        "GPU_MEMORY_UTILIZATION",
        "Share of the memory for this engine; what is left of it is KV cache",
        otherwise="not used on the CPU",
    ),
    _engine_flag(
        "KV_CACHE_MEMORY_BYTES",
        "KV cache, bytes or as 2GiB",
        otherwise="2 GiB or a fifth of the memory, the smaller",
    ),
    _engine_flag("BLOCK_SIZE", "Positions in a KV block", "16"),
    _engine_flag(
        "DTYPE", "auto (bfloat16 where the processor computes in it, else float32), bfloat16 or float32", "auto"
    ),
    _engine_flag("KV_CACHE_DTYPE", "Only auto for now: the dtype of the model", "auto"),
    _engine_flag("QUANTIZATION", "Only none for now", "none"),
    _engine_flag("ENABLE_PREFIX_CACHING", "1 or 0", "1"),
    _engine_flag("ENABLE_CHUNKED_PREFILL", "Only 1 for now", "1"),
    _engine_flag("TENSOR_PARALLEL_SIZE", "Only 1 for now", "1"),
    _engine_flag("MAX_LORAS", "Adapter slots", "8"),
    _engine_flag("MAX_CPU_LORAS", "Adapters kept in host memory", otherwise="4 x MAX_LORAS"),
    _engine_flag("MAX_LORA_RANK", "Highest rank that is served, at most 256", "64"),
    _engine_flag("ADAPTER_CACHE_BYTES", "Adapter files kept on disk by an engine, bytes or as 2GiB", "10GiB"),
    _engine_flag("DEVICE", "auto or cpu; this version has no GPU form", "auto"),
    _engine_flag("ATTENTION_BACKEND", "Only auto for now", "auto"),
    _engine_flag("ENFORCE_EAGER", "Only 1 for now", "1"),
    _engine_flag("SEED", "Only 0 for now: each request is seeded by its own seed", "0"),
    _engine_flag("ADAPTER_LOAD_TIMEOUT", "Longest wait for an adapter, s", "60"),
    _engine_flag("STEP_TIMEOUT", "Silence after which the core counts as stuck and is started again, s", "60"),
    _engine_flag("CPU_THREADS", "Threads of the core process", otherwise="the cores it may use"),
    _engine_flag("TOOL_CALL_PARSER", "Form of tool calls; auto: what the chat template shows", "auto"),
    _engine_flag("SERVED_MODEL_NAME", "Name under which the base is served", otherwise="made from BASE"),
    Setting(
        "LORAPLEX_ENGINE_BASE",
        (_ENGINE, _UP),
        "Folder or name of the base",
        part_to_default={_UP: "smollm2-135m"},
    ),
)
_NAME_TO_SETTING = {setting.name: setting for setting in SETTINGS}
_SHORT_NAMES = [name.removeprefix(PREFIX) for name in _NAME_TO_SETTING]


def read_settings(environ: Mapping[str, str], part: str) -> dict[str, str]:
    """Return the settings of `part` as text, keyed without prefix in lower case, defaults filled in.

    A setting that is absent (or empty) and has no default has no key in the result.

    Args:
        environ: The environment.
        part: gateway, registry, engine, up or client.

    Raises:
        SettingError: A name is a near miss of a known one or not built yet, X and X_FILE are both given, or a file
            cannot be read.
    """
    check_names(environ)
    found = [find_setting(environ, setting, part) for setting in SETTINGS if part in setting.parts]
    return {one.setting.key: one.value for one in found if one.value is not None}


def find_setting(environ: Mapping[str, str], setting: Setting, part: str) -> FoundSetting:
    """Return what holds for a setting in `part`, by its environment alone.

    Raises:
        SettingError: It is not built yet, X and X_FILE are both given, or the file cannot be read.
    """
    value, path = environ.get(setting.name), environ.get(f"{setting.name}_FILE")
    if (value or path) and not setting.is_built:
        raise SettingError(f"{setting.name} is not supported yet; unset it", param=setting.name)
    if value and path:
        raise SettingError(f"Give {setting.name} or {setting.name}_FILE, not both", param=setting.name)
    if path:
        return FoundSetting(setting, _read_file(setting, Path(path)), "file", path)
    if value:
        return FoundSetting(setting, value, "environment")
    default = setting.default_of(part)
    return FoundSetting(setting, default, "none" if default is None else "default")


def mask(setting: Setting, value: str) -> str:
    """Return a value as it may be shown: a secret URL without its password, of another secret only the length."""
    if not setting.is_secret:
        return mask_passwords(value)
    if setting.name.endswith("_URL") and "://" in value:
        return mask_passwords(_SECRET_IN_URL.sub(r"\1***@", value))
    return f"*** ({len(value)} characters)"


def mask_passwords(text: str) -> str:
    """Return `text` without the passwords of URLs in it, and without parameters of URLs that name secrets."""
    text = _PASSWORD_IN_URL.sub(r"\1***@", text)
    return _SECRET_PARAMETER.sub(r"\1***", text)


def read_days(name: str, text: str) -> int:
    """Return the whole days that setting `name` holds, 0 to 36,500.

    Raises:
        SettingError: It is something else.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DAYS_LEN and int(text) <= _MAX_DAYS):
        raise SettingError(f"{name} is a whole number of days from 0 to {_MAX_DAYS:,}, not {text!r}", param=name)
    return int(text)


def read_pool_size(text: str) -> int:
    """Return the connections that LORAPLEX_DATABASE_POOL_SIZE holds, 1 to 1,000.

    Raises:
        SettingError: It is something else.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DAYS_LEN and 1 <= int(text) <= _MAX_POOL_SIZE):
        name = "LORAPLEX_DATABASE_POOL_SIZE"
        raise SettingError(f"{name} is a whole number from 1 to {_MAX_POOL_SIZE:,}, not {text!r}", param=name)
    return int(text)


def read_drain_s(text: str) -> float:
    """Return the seconds that LORAPLEX_DRAIN_S holds, 0 to 3,600.

    Raises:
        SettingError: It is something else.
    """
    name = "LORAPLEX_DRAIN_S"
    is_number = text.isascii() and text.replace(".", "", 1).isdigit() and len(text) <= _MAX_DRAIN_LEN
    if not is_number or float(text) > _MAX_DRAIN_S:
        raise SettingError(f"{name} is a number of seconds from 0 to {_MAX_DRAIN_S:,.0f}, not {text!r}", param=name)
    return float(text)


def check_names(environ: Mapping[str, str]) -> None:
    """Log each unknown `LORAPLEX_*` name.

    Raises:
        SettingError: An unknown name is within two edits of a known one.
    """
    for one in find_unknown(environ):
        if one.is_fatal:
            raise SettingError(f"{one.name} is not a setting; did you mean {one.nearest}?", param=one.name)
        _log.warning("%s is not a setting and is ignored", one.name)


def find_unknown(environ: Mapping[str, str]) -> Iterator[UnknownSetting]:
    """Yield the `LORAPLEX_*` names that are no settings, but for those that Kubernetes injects."""
    for name in sorted(environ):
        if not name.startswith(PREFIX) or _is_known(name) or _INJECTED_BY_KUBERNETES.fullmatch(name):
            continue
        near = [known for known in _NAME_TO_SETTING if _is_typo(name, known)]
        alike = difflib.get_close_matches(name.removeprefix(PREFIX), _SHORT_NAMES, 1)
        nearest = " or ".join(near) or (f"{PREFIX}{alike[0]}" if alike else None)
        yield UnknownSetting(name, nearest, bool(near))


def _is_known(name: str) -> bool:
    return name in _OF_TESTS or name in _NAME_TO_SETTING or name.removesuffix("_FILE") in _NAME_TO_SETTING


def _read_file(setting: Setting, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{setting.name}_FILE cannot be read: {error}", param=setting.name) from error


def _is_typo(name: str, known: str) -> bool:
    # each edit changes the length by one at most, and a name may have any length
    is_near = abs(len(name) - len(known)) <= _MAX_TYPO_DISTANCE
    return is_near and _edit_distance(name, known) <= _MAX_TYPO_DISTANCE


def _edit_distance(left: str, right: str) -> int:
    """Levenshtein distance, by rows."""
    previous = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        row = [i]
        for j, b in enumerate(right, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (a != b)))
        previous = row
    return previous[-1]
