"""Whether a part could start with its settings: each value by itself, then what the part's own loader says of all.

Every problem is found, not only the first. The engine's flags are judged by the engine's own program.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from loraplex.client.location import check_url, find_empty
from loraplex.config.resolved import Resolved, SettingProblem
from loraplex.db.database import check_database_url
from loraplex.fleet.pools import parse_pools
from loraplex.keys.files import check_admin_key
from loraplex.settings import check_redis_url, load_settings, read_networks, split_listen
from loraplex.supervisor.environment import build_environment
from loraplex.supervisor.flag_check import find_sentence
from loraplex_registry.wire.identity import TokenError, TokenSigner, TokenVerifier, split_public_keys
from loraplex_registry.wire.log import FORMATS, LEVELS
from loraplex_registry.wire.setting import SettingError, read_days, read_drain_s, read_pool_size

_ENGINE_PREFIX = "LORAPLEX_ENGINE_"
_ENGINE_S = 60
_HTTP = re.compile(r"https?://[^\s/@]+/?")
_SWITCHES = ("LORAPLEX_NATIVE", "LORAPLEX_TEST_HOOKS")
Loader = Callable[[Mapping[str, str]], object]


def judge(
    resolved: Resolved, environ: Mapping[str, str], load_registry: Loader, check_store: Callable[..., object]
) -> list[SettingProblem]:
    """Return what keeps `resolved.part` from starting, nothing if it would start.

    Args:
        resolved: Its settings.
        environ: The environment that they came from.
        load_registry: The registry's own loader of an environment.
        check_store: Raises where URL and public URL of an object store are not valid.
    """
    problems = list(resolved.problems)
    if resolved.part == "client":
        problems += [SettingProblem(name, message) for name, message in find_empty(environ).items()]
    problems += [
        SettingProblem(one.name, f"{one.name} is not a setting; did you mean {one.nearest}?")
        for one in resolved.unknown
        if one.is_fatal
    ]
    for name, check in {**_build_checks(), "LORAPLEX_OBJECT_STORE_URL": _pair(check_store, resolved)}.items():
        value = resolved.value(name)
        if value is not None and (message := _find_mistake(name, check, value)):
            problems.append(SettingProblem(name, message))
    if not problems:
        problems += _judge_whole(resolved, environ, load_registry)
    if resolved.part in ("engine", "up"):
        known = {problem.message for problem in problems}
        problems += [one for one in _judge_flags(resolved, environ) if one.message not in known]
    return problems


def _build_checks() -> dict[str, Callable[[str], Any]]:
    checks: dict[str, Callable[[str], Any]] = {
        "LORAPLEX_URL": check_url,
        "LORAPLEX_ADMIN_KEY": check_admin_key,
        "LORAPLEX_LISTEN": split_listen,
        "LORAPLEX_DATABASE_URL": check_database_url,
        "LORAPLEX_DATABASE_POOL_SIZE": read_pool_size,
        "LORAPLEX_REDIS_URL": check_redis_url,
        "LORAPLEX_REGISTRY_URL": _check_http,
        "LORAPLEX_TRUSTED_PROXIES": read_networks,
        "LORAPLEX_POOLS": parse_pools,
        "LORAPLEX_SIGNING_KEY": lambda text: TokenSigner(text.encode()),
        "LORAPLEX_VERIFY_KEYS": lambda text: TokenVerifier(split_public_keys(text), "engine"),
        "LORAPLEX_PARITY_GATE": _choice("LORAPLEX_PARITY_GATE", ("required", "when_available", "off")),
        "LORAPLEX_DRAIN_S": read_drain_s,
        "LORAPLEX_LOG_LEVEL": _choice("LORAPLEX_LOG_LEVEL", LEVELS),
        "LORAPLEX_LOG_FORMAT": _choice("LORAPLEX_LOG_FORMAT", FORMATS),
    }
    for name in ("LORAPLEX_PURGE_AFTER_DAYS", "LORAPLEX_OUTCOME_DAYS"):
        checks[name] = partial(read_days, name)
    return checks | {name: _choice(name, ("0", "1")) for name in _SWITCHES}


def _find_mistake(name: str, check: Callable[[str], Any], value: str) -> str | None:
    """Return why a value is refused; what a library says of a key is left out, as it may quote it."""
    try:
        check(value)
    except (TokenError, ValueError, TypeError):
        return f"{name} holds no key of the right kind; give an Ed25519 key in PEM"
    except Exception as error:
        message = getattr(error, "message", None)
        if not isinstance(message, str):
            raise
        return message
    return None


def _judge_whole(resolved: Resolved, environ: Mapping[str, str], load_registry: Loader) -> list[SettingProblem]:
    told = dict(environ)
    # a flag wins over both forms of its variable
    for name, found in resolved.settings.items():
        if found.source == "flag" and found.value is not None:
            told.pop(f"{name}_FILE", None)
            told[name] = found.value
    loaders: dict[str, Loader] = {"gateway": load_settings, "registry": load_registry}
    try:
        loaders.get(resolved.part, _load_nothing)(told)
    except Exception as error:
        message = getattr(error, "message", None)
        if not isinstance(message, str):
            raise
        return [SettingProblem(getattr(error, "param", None) or resolved.part, message)]
    if resolved.part == "engine":
        return [
            SettingProblem(name, f"An engine needs {name}: {why}")
            for name, why in (
                ("LORAPLEX_VERIFY_KEYS", "the gateway's public key, the only one that it trusts"),
                ("LORAPLEX_ENGINE_BASE", "the base that it serves, or --base"),
            )
            if not resolved.value(name)
        ]
    return []


def _judge_flags(resolved: Resolved, environ: Mapping[str, str]) -> list[SettingProblem]:
    """Ask the engine's program, which judges flags and settings and starts nothing."""
    env = build_environment(environ, resolved.part)
    for name, found in resolved.settings.items():
        if found.source == "flag" and found.value is not None:
            env.pop(f"{name}_FILE", None)
            env[name] = found.value
    try:
        done = subprocess.run(
            (sys.executable, "-m", "loraplex_engine", "check"),
            env=env,
            capture_output=True,
            text=True,
            timeout=_ENGINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [SettingProblem("engine", f"The engine did not judge its settings within {_ENGINE_S} s; try again")]
    if done.returncode == 0:
        return []
    sentence = find_sentence(done.stderr.strip())
    flag = re.search(r"--([a-z-]+)", sentence)
    name = _ENGINE_PREFIX + flag[1].upper().replace("-", "_") if flag else "engine"
    return [SettingProblem(name, sentence)]


def _pair(check_store: Callable[..., object], resolved: Resolved) -> Callable[[str], Any]:
    return lambda url: check_store(url, resolved.value("LORAPLEX_OBJECT_STORE_PUBLIC_URL"))


def _choice(name: str, known: tuple[str, ...]) -> Callable[[str], None]:
    def check(text: str) -> None:
        if text not in known:
            raise SettingError(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, not {text!r}")

    return check


def _check_http(text: str) -> None:
    if not _HTTP.fullmatch(text):
        raise SettingError("LORAPLEX_REGISTRY_URL must be http://HOST[:PORT] or https://HOST[:PORT]")


def _load_nothing(environ: Mapping[str, str]) -> None:
    """Parts without a loader of their own have nothing to say of the whole."""
