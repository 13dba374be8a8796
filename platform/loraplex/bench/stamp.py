"""Where a benchmark was taken: this machine, the versions at work, and what the server says of itself."""

from __future__ import annotations

import datetime as dt
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from loraplex.bench.client import Server
from loraplex.bench.result import Stamp
from loraplex.version import __version__

_LIBRARIES = ("httptools", "msgspec", "numpy", "uvloop")
_ANSWER_S = 10.0
_MAX_MODELS = 50
_FACTS = ("server", "x-loraplex-version")


def build_stamp(flags: Mapping[str, Any], servers: Mapping[str, Server]) -> Stamp:
    """Return the stamp; servers that do not say are stamped by their address."""
    return Stamp(
        taken_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        versions={
            "loraplex": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _LIBRARIES if _is_installed(name)},
        },
        machine=_describe_machine(),
        flags=dict(flags),
        servers={name: _describe_server(server) for name, server in servers.items()},
    )


def count_busy_s() -> float | None:
    """Return for how long the cores of this machine have worked, in all; None where nobody counts."""
    try:
        ticks = [int(text) for text in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]]
    except OSError:
        return None
    # user nice system idle iowait irq softirq
    return (sum(ticks[:3]) + sum(ticks[5:7])) / os.sysconf("SC_CLK_TCK")


def scrape(server: Server, url: str | None) -> str:
    """Return the server's metrics as text; empty where it shows none to this key."""
    answer = _get(server, url or f"{server.url}/metrics")
    return answer.text if answer is not None and answer.is_success else ""


def _describe_machine() -> dict[str, Any]:
    return {
        "cpu": _name_cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": round(os.getloadavg()[0], 2),
        "command": Path(sys.argv[0]).name,
    }


def _name_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _describe_server(server: Server) -> dict[str, Any]:
    facts: dict[str, Any] = {"url": server.url}
    models = _get(server, f"{server.url}/v1/models")
    if models is not None and models.is_success:
        facts |= {name: models.headers[name] for name in _FACTS if name in models.headers}
        listed = _read_json(models).get("data")
        if isinstance(listed, list):
            kept = ("id", "root", "parent", "owned_by")
            rows = [row for row in listed if isinstance(row, dict)][:_MAX_MODELS]
            facts["models"] = [{name: row.get(name) for name in kept if row.get(name)} for row in rows]
    fleet = _get(server, f"{server.url}/api/v1/fleet")
    if fleet is not None and fleet.is_success:
        facts["engines"] = [_describe_engine(row) for row in _read_json(fleet).get("data", []) if isinstance(row, dict)]
    version = _get(server, f"{server.url}/version")
    if version is not None and version.is_success and (told := _read_json(version)):
        facts["version"] = told
    return facts


def _describe_engine(row: dict[str, Any]) -> dict[str, Any]:
    state = row.get("state")
    return {"replica": row.get("replica"), "runs": state.get("model") if isinstance(state, dict) else None}


def _get(server: Server, url: str) -> httpx.Response | None:
    is_same = urlsplit(url)[:2] == urlsplit(server.url)[:2]
    headers = {"authorization": f"Bearer {server.key}"} if server.key and is_same else {}
    try:
        # without TLS no certificates are read, which would take longer than the answer
        return httpx.get(url, headers=headers, timeout=_ANSWER_S, trust_env=False, verify=url.startswith("https:"))
    except httpx.HTTPError:
        return None


def _read_json(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
