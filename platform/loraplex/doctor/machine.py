"""This machine: room on its disks, open files, shared memory, ports, proxies, and what computes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import httpx

from loraplex.doctor.finding import Finding, Verdict
from loraplex.doctor.listener import find_listener
from loraplex.doctor.patient import Patient
from loraplex.settings import split_listen
from loraplex.supervisor.engine_program import INSTALL_ENGINE
from loraplex.supervisor.environment import build_environment
from loraplex.supervisor.errors import PortTakenError
from loraplex.supervisor.port import check_port_free

_MIB, _GIB = 1 << 20, 1 << 30
_FEW_BYTES, _SCARCE_BYTES = 512 * _MIB, 5 * _GIB
_FEW_INODES, _SCARCE_INODES = 1_000, 20_000
_FEW_FILES, _ENOUGH_FILES = 1024, 4096
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at
_ENOUGH_SHARED = _GIB
_COMPUTING = ("engine", "up")
_FOLDER_SETTINGS = {
    "data folder": "LORAPLEX_DATA_DIR or --data-dir",
    "object store": "LORAPLEX_OBJECT_STORE_URL",
    "uploads on their way": "TMPDIR",
    "cache": "LORAPLEX_CACHE_DIR",
}
_PROXY_NAMES = ("http_proxy", "https_proxy", "all_proxy")
_ASK_S = 1.0
_ALIVE = ({"status": "alive"}, {"status": "ok"})
"""What gateway and engine, and a registry of its own, answer on /healthz."""

INSPECT_S = 90.0
StatVfs = Callable[[str], os.statvfs_result]


def check_disks(patient: Patient, statvfs: StatVfs = os.statvfs) -> Iterator[Finding]:
    """Look at the file systems of every folder that the part writes to."""
    files = set()
    for what, path in _list_folders(patient):
        place = find_place(path)
        if not place.is_dir():
            if place not in files:
                remedy = f"Name a folder by {_FOLDER_SETTINGS[what]}."
                yield Finding("machine.disk", "fail", f"{place} ({what}) is a file, not a folder.", remedy, str(place))
            files.add(place)
            continue
        facts = statvfs(str(place))
        yield _judge_room(what, path, facts)
    if patient.part == "client":
        yield Finding("machine.disk", "skip", "This machine only calls: it keeps nothing.")


def find_place(path: Path) -> Path:
    """Return what there is of a path by now: itself, or the nearest folder above it."""
    return next(place for place in (path, *path.parents) if place.exists())


def _list_folders(patient: Patient) -> Iterator[tuple[str, Path]]:
    if patient.part == "client":
        return
    if patient.folder is not None:
        yield "data folder", patient.folder.path
    url = patient.value("LORAPLEX_OBJECT_STORE_URL")
    if url is not None and url.startswith("file:"):
        yield "object store", Path(unquote(urlsplit(url).path))
    elif url is not None and patient.folder is None:
        yield "uploads on their way", Path(tempfile.gettempdir())
    if patient.part in _COMPUTING and (cache := patient.value("LORAPLEX_CACHE_DIR")):
        yield "cache", Path(cache).expanduser().absolute()


def _judge_room(what: str, path: Path, facts: os.statvfs_result) -> Finding:
    free, inodes = facts.f_bavail * facts.f_frsize, facts.f_favail
    # some file systems have no table of inodes
    has_inodes = facts.f_files > 0
    shown = f"{path} ({what}) has {_show(free)} free" + (f" and {inodes:,} inodes." if has_inodes else ".")
    remedy = f"Free or add room where {path} lies."
    if free < _FEW_BYTES or (has_inodes and inodes < _FEW_INODES):
        return Finding("machine.disk", "fail", shown, remedy, str(path))
    if free < _SCARCE_BYTES or (has_inodes and inodes < _SCARCE_INODES):
        return Finding("machine.disk", "warn", shown, remedy, str(path))
    return Finding("machine.disk", "ok", shown, subject=str(path))


def check_limits(patient: Patient) -> Iterator[Finding]:
    """Look at what the system allows a process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= _ENOUGH_FILES:
        shown = "as many files as it likes" if most == resource.RLIM_INFINITY else f"{most:,} files"
        yield Finding("machine.files", "ok", f"A process may open {shown}.")
    else:
        verdict: Verdict = "fail" if most < _FEW_FILES else "warn"
        remedy = "Raise the hard limit: ulimit -Hn 65536, LimitNOFILE= of the unit, or the container's ulimits."
        yield Finding("machine.files", verdict, f"A process may open {most:,} files, and each client is one.", remedy)
    if patient.part in _COMPUTING:
        yield _judge_shared()


def _judge_shared() -> Finding:
    check = "machine.shared_memory"
    try:
        facts = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return Finding(check, "warn", "There is no /dev/shm: adapters pass through the temporary folder.", "Mount one.")
    size = facts.f_blocks * facts.f_frsize
    if size >= _ENOUGH_SHARED:
        return Finding(check, "ok", f"{_SHARED_MEMORY} has {_show(size)}.")
    why = f"{_SHARED_MEMORY} has {_show(size)}: larger adapters pass through the temporary folder, more slowly."
    return Finding(check, "warn", why, "Give the container 1 GiB: --shm-size=1g, or an emptyDir with medium: Memory.")


def check_port(patient: Patient) -> Iterator[Finding]:
    """Look whether the part can listen where it was told, or whether it is the one that does."""
    listen = patient.value("LORAPLEX_LISTEN")
    if listen is None:
        yield Finding("machine.port", "skip", "This machine only calls: it listens nowhere.")
        return
    host, port = split_listen(listen)
    if not port:
        yield Finding("machine.port", "ok", "Any free port will do.")
        return
    try:
        check_port_free(host, port)
    except PortTakenError as error:
        yield _judge_taken(listen, host, port, error)
    else:
        yield Finding("machine.port", "ok", f"{listen} is free.")


def _judge_taken(listen: str, host: str, port: int, error: PortTakenError) -> Finding:
    owner = find_listener(port)
    who = f"process {owner.pid} ({owner.name})" if owner is not None else "a process of another user"
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    if _is_loraplex(f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{port}"):
        return Finding("machine.port", "ok", f"A part of Loraplex listens on {listen}: {who}.")
    message = error.message if owner is None else f"{listen} is taken by {who}."
    return Finding("machine.port", "fail", message, "Stop it, or set LORAPLEX_LISTEN to another.")


def _is_loraplex(url: str) -> bool:
    try:
        answer = httpx.get(f"{url}/healthz", timeout=_ASK_S, trust_env=False)
        return answer.json() in _ALIVE
    except (httpx.HTTPError, ValueError):
        return False


def check_proxies(patient: Patient) -> Iterator[Finding]:
    """Look at proxies of the environment: which calls take them, and which should not."""
    names = [name for name in patient.environ if name.lower() in _PROXY_NAMES and patient.environ[name]]
    if not names:
        yield Finding("machine.proxies", "ok", "The environment names no proxy.")
        return
    endpoint = _find_endpoint(patient.value("LORAPLEX_OBJECT_STORE_URL"))
    shown = ", ".join(sorted(f"{name}={patient.environ[name]}" for name in names))
    if endpoint is not None and not _is_direct(endpoint, patient):
        why = f"Calls to the object store at {endpoint} go through {shown}."
        remedy = f"Add {endpoint} to NO_PROXY, unless the proxy is meant to carry adapters."
        yield Finding("machine.proxies", "warn", why, remedy)
        return
    why = f"{shown}: for downloads of bases and gateways elsewhere; never between the parts."
    yield Finding("machine.proxies", "ok", why)


def _find_endpoint(url: str | None) -> str | None:
    parts = urlsplit(url or "")
    if parts.scheme != "s3":
        return None
    endpoint = parse_qs(parts.query).get("endpoint", [""])[0]
    return urlsplit(endpoint).hostname or "s3.amazonaws.com"


def _is_direct(host: str, patient: Patient) -> bool:
    """Say whether NO_PROXY names a host, itself or a domain that it is in."""
    listed = (patient.environ.get("no_proxy") or patient.environ.get("NO_PROXY") or "").lower().split(",")
    domains = [entry.strip().partition(":")[0].lstrip(".") for entry in listed]
    return any(domain and (domain in ("*", host) or host.endswith(f".{domain}")) for domain in domains)


def check_accelerator(patient: Patient) -> Iterator[Finding]:
    """Ask the engine's own program what it would compute with; the control plane has no torch."""
    if patient.part not in _COMPUTING:
        yield Finding("machine.gpu", "skip", f"{patient.part} computes nothing.")
        return
    env = build_environment(patient.environ, "engine")
    env["LORAPLEX_CACHE_DIR"] = str(Path(patient.value("LORAPLEX_CACHE_DIR") or "").expanduser().absolute())
    done = subprocess.run(
        (sys.executable, "-m", "loraplex_engine", "inspect"),
        env=env,
        capture_output=True,
        text=True,
        timeout=INSPECT_S,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        remedy = f"{INSTALL_ENGINE}, with a torch that fits the driver."
        yield Finding("machine.torch", "fail", f"The engine's program cannot compute here: {last}", remedy)
        return
    for row in json.loads(done.stdout.splitlines()[-1]):
        yield Finding(f"machine.{row['check']}", row["verdict"], row["message"], row["remedy"])


def _show(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"
