"""The whole examination: which checks there are for one part, and what they found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec

from loraplex.client.errors import ClientError
from loraplex.client.location import LOCK_FILE, Location, default_data_dir, find_location, is_locked
from loraplex.config.resolved import choose_part, resolve
from loraplex.doctor.database import check_database
from loraplex.doctor.engines import check_engines
from loraplex.doctor.finding import Check, Finding, run_checks
from loraplex.doctor.keys import check_keys, check_pepper, check_registry_door
from loraplex.doctor.machine import (
    INSPECT_S,
    check_accelerator,
    check_disks,
    check_limits,
    check_port,
    check_proxies,
)
from loraplex.doctor.patient import Patient, RegistryDoor
from loraplex.doctor.platform import check_platform
from loraplex.doctor.redis_server import check_redis
from loraplex.doctor.settings import check_settings
from loraplex.doctor.store import check_store
from loraplex_registry.wire.setting import SettingError

_SETTINGS_S = 60.0
_CHECKS: tuple[tuple[str, Callable[[Patient], Iterator[Finding]], str], ...] = (
    ("keys", check_keys, "A file with a key cannot be read: look at where it lies."),
    ("database", check_database, "The database hangs, or a firewall drops its packets: check host, port and network."),
    ("keys.hashes", check_pepper, "The database hangs: see there."),
    (
        "store",
        check_store,
        "The store hangs, or a firewall drops its packets: check endpoint, DNS, proxies and network.",
    ),
    ("redis", check_redis, "Redis hangs, or a firewall drops its packets: check host, port and network."),
    ("engines", check_engines, "A name server or an engine hangs: check DNS and the addresses in LORAPLEX_POOLS."),
    ("registry", check_registry_door, "The registry hangs: look at the gateway's log."),
    ("platform", check_platform, "The gateway hangs: look at its log."),
    ("machine.disk", check_disks, "A file system hangs: look at network mounts."),
    ("machine.limits", check_limits, ""),
    ("machine.port", check_port, "Whoever has the port does not answer."),
    ("machine.proxies", check_proxies, ""),
)
_CLIENT_ONLY = ("platform", "machine.proxies")
_OF_ONE_MACHINE = ("up", "client")


class Examination(msgspec.Struct, frozen=True):
    """What was found of one part; `is_healthy` without failures."""

    part: str
    is_healthy: bool
    findings: list[Finding]


def admit(
    environ: Mapping[str, str],
    door: RegistryDoor,
    limit_s: float,
    part: str | None = None,
    data_dir: Path | None = None,
) -> Patient:
    """Return whom to examine, from an environment alone.

    Args:
        environ: The environment.
        door: What is asked of the registry.
        limit_s: How long each check may take, seconds.
        part: Whose settings these are; None: the part that they look like.
        data_dir: The data folder, where a flag names it.
    """
    told = dict(environ)
    if data_dir is not None:
        told["LORAPLEX_DATA_DIR"] = str(data_dir.expanduser().resolve())
    resolved = resolve(told, part or choose_part(told))
    return Patient(resolved, told, door, _find_location(told, resolved.part), limit_s)


def examine(patient: Patient) -> Examination:
    """Run every check that is for the patient's part."""
    checks = [
        Check(name, partial(find, patient), patient.limit_s, remedy)
        for name, find, remedy in _CHECKS
        if patient.part != "client" or name in _CLIENT_ONLY
    ]
    checks.insert(0, Check("settings", partial(check_settings, patient), _SETTINGS_S, "Try again."))
    if patient.part != "client":
        checks.append(Check("machine.gpu", partial(check_accelerator, patient), INSPECT_S, "Run: nvidia-smi"))
    findings = [patient.hide(finding) for finding in run_checks(checks)]
    return Examination(patient.part, all(one.verdict != "fail" for one in findings), findings)


def _find_location(environ: Mapping[str, str], part: str) -> Location | None:
    """Return the gateway to ask: the one that is named, or the one of the data folder; None if there is neither."""
    try:
        location = find_location(environ)
    except (SettingError, ClientError):
        # the check of the settings says so
        return None
    is_named = bool(environ.get("LORAPLEX_URL") or environ.get("LORAPLEX_URL_FILE"))
    # a part of a cluster has nothing to do with what this user runs beside it, nor has one that was killed
    is_own = part in _OF_ONE_MACHINE or bool(environ.get("LORAPLEX_DATA_DIR"))
    runs_here = location.is_direct and is_own and is_locked(default_data_dir(environ) / LOCK_FILE)
    return location if is_named or runs_here else None
