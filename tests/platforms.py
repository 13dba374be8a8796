"""A whole platform for tests: `loraplex up` as a child process on free ports, in a data folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from loraplex.client.connection import Connection
from loraplex.client.location import Location
from loraplex.client.management import Management
from loraplex.client.upload import list_files
from loraplex_registry.wire.identity import Identity, TokenSigner

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "adapters"
_STOP_S = 60


@dataclass
class LivePlatform:
    """A platform that serves; `process` is its supervisor."""

    url: str
    data_dir: Path
    process: subprocess.Popen[bytes]
    admin_key: str = field(repr=False)
    clients: list[OpenAI] = field(default_factory=list, repr=False)
    """Those of `openai`, which end with the platform: a socket that is left to the collector fails some other test."""

    def openai(self, key: str | None = None) -> OpenAI:
        """The official client with a key, the administrator's by default; it never tries again by itself."""
        client = OpenAI(base_url=f"{self.url}/v1", api_key=key or self.admin_key, max_retries=0, timeout=300)
        self.clients.append(client)
        return client

    @contextmanager
    def management(self, key: str | None = None) -> Iterator[Management]:
        """Our own client."""
        with Connection(Location(self.url, key or self.admin_key)) as connection:
            yield Management(connection)

    def cli(self, *arguments: str, key: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a `loraplex` command against it and return what came out."""
        env = os.environ | {"LORAPLEX_URL": self.url, "LORAPLEX_API_KEY": key or self.admin_key}
        argv = [sys.executable, "-m", "loraplex", *arguments]
        return subprocess.run(
            argv, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300, stdin=subprocess.DEVNULL
        )

    def engine_metrics(self) -> dict[str, float]:
        """The engine's metrics without labels, and with labels under the whole sample name."""
        text = self.ask_engine("/metrics").text
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def engine_state(self) -> dict[str, Any]:
        """The engine's slots, queue and KV pool at the moment."""
        state: dict[str, Any] = self.ask_engine("/internal/state").json()
        return state

    def wait_idle(self, limit_s: float = 60.0) -> None:
        """Wait until the engine holds nothing for anybody."""

        def is_idle() -> bool:
            state = self.engine_state()
            pins = sum(slot["pins"] for slot in state["slots"])
            is_free = state["kv"]["num_free"] == state["kv"]["num_blocks"]
            return is_free and state["running"] + state["waiting"] + state["open_requests"] + pins == 0

        wait_for(is_idle, limit_s)

    def ask_engine(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Get a private path of the engine, or post a body to it."""
        signer = TokenSigner((self.data_dir / "signing.pem").read_bytes())
        identity = Identity(
            role="admin",
            tenant_id=None,
            tenant=None,
            scopes=(),
            key_id="test",
            actor="test",
            request_id="req_test",
        )
        with self.management() as client:
            (engine,) = client.list_fleet()
        headers = {"authorization": f"Bearer {signer.sign(identity, 'engine')}"}
        method = "GET" if body is None else "POST"
        return httpx.request(method, f"{engine.url}{path}", json=body, headers=headers, timeout=60).raise_for_status()


@contextmanager
def running_platform(
    data_dir: Path, *flags: str, exit_code: int = 0, env: dict[str, str] | None = None
) -> Iterator[LivePlatform]:
    """Start a platform and yield it when it serves; at the end it must stop by itself, with `exit_code`.

    Unless `env` says otherwise its parity gate is off, as an upload would wait for a minute on a busy machine, and its
    KV pool is small, as each start touches all of it.
    """
    defaults = {"LORAPLEX_PARITY_GATE": "off", "LORAPLEX_ENGINE_KV_CACHE_MEMORY_BYTES": "512MiB"}
    environ = os.environ | defaults | (env or {})
    argv = [sys.executable, "-m", "loraplex", "up", "--json", "--port", "0", "--data-dir", str(data_dir), *flags]
    log = (data_dir.parent / f"{data_dir.name}.log").open("wb")
    options: dict[str, Any] = {"cwd": ROOT, "env": environ, "stdin": subprocess.DEVNULL}
    clients: list[OpenAI] = []
    with log, subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, **options) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, f"the platform did not start:\n{Path(log.name).read_text()}"
            ready = json.loads(line)
            key = Path(ready["admin_key_file"]).read_text().strip()
            yield LivePlatform(ready["url"], data_dir, process, key, clients)
        finally:
            for client in clients:
                client.close()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        assert process.returncode == exit_code, Path(log.name).read_text()


@dataclass(frozen=True)
class Team:
    """A tenant with one adapter; `key` may call it and upload to it."""

    name: str
    digest: str
    key: str = field(repr=False)


def create_team(platform: LivePlatform, name: str, style: str) -> Team:
    """A tenant, a key and a first version of an example adapter, made as an administrator makes them."""
    scopes = ["infer", "adapters:read", "adapters:write", "usage:read"]
    with platform.management() as client:
        client.create_tenant(name)
        key = client.create_key(name, "e2e", scopes=scopes).key
    assert key
    with platform.management(key) as client:
        version = client.push(name, "default", list_files(EXAMPLES / style), lambda _: None)
    assert (version.state, version.promoted) == ("ready", True)
    return Team(name, version.digest, key)


def list_children(pid: int) -> list[int]:
    """All processes below `pid`."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found] + [below for child in found for below in list_children(int(child))]


def command_of(pid: int) -> str:
    """Its command line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait until a condition holds, and fail after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)
