"""Real processes to measure: a registry that teams upload to, and what a core's front sees of the core."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from core_world import Core
from loraplex.client.connection import Connection
from loraplex.client.location import Location
from loraplex.client.management import Management
from loraplex.client.upload import list_files
from loraplex_engine.wire import messages as wire
from loraplex_registry.app import upgrade
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.wire.identity import Identity, TokenSigner, generate_signing_key
from registry_world import ENGINE_KEY
from support import free_port

_TENANT = "bench"
_START_S, _STOP_S, _ANSWER_S = 60.0, 20.0, 120.0


class LiveRegistry:
    """A registry process that knows one base."""

    def __init__(self, url: str, signer: TokenSigner) -> None:
        self.url = url
        self._signer = signer
        self._num_pushed = 0

    def register(self, spec: BaseSpec) -> None:
        """Make the base known."""
        headers = {"authorization": f"Bearer {self._sign('admin')}"}
        body = msgspec.json.encode(spec)
        httpx.post(f"{self.url}/api/v1/bases", content=body, headers=headers, trust_env=False).raise_for_status()

    def push(self, source: Path) -> str:
        """Upload a PEFT folder as an adapter of its own; returns its digest."""
        self._num_pushed += 1
        with Connection(Location(self.url, self._sign("tenant"))) as connection:
            files = list_files(source)
            version = Management(connection).push(_TENANT, f"a{self._num_pushed}", files, lambda _: None)
        assert version.state == "ready", version
        return version.digest

    def _sign(self, role: str) -> str:
        identity = Identity(
            role=role,
            tenant_id="id-bench" if role == "tenant" else None,
            tenant=_TENANT if role == "tenant" else None,
            scopes=("adapters:read", "adapters:write"),
            key_id="bench",
            actor="bench",
            request_id="req_bench",
            target_tenant_id="id-bench",
            target_tenant=_TENANT,
        )
        return self._signer.sign(identity, "registry")


@contextmanager
def running_registry(folder: Path) -> Iterator[LiveRegistry]:
    """Start a registry process with its data in `folder`."""
    signer = TokenSigner(generate_signing_key())
    folder.mkdir()
    upgrade(f"sqlite+aiosqlite:///{folder}/loraplex.db")
    port = free_port()
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")},
        "LORAPLEX_DATA_DIR": str(folder),
        "LORAPLEX_LISTEN": f"127.0.0.1:{port}",
        "LORAPLEX_VERIFY_KEYS": signer.public_pem.decode(),
        "LORAPLEX_ENGINE_KEY": ENGINE_KEY,
    }
    log = folder / "registry.log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-P", "-m", "loraplex_registry"], env=environ, stderr=output)
    try:
        registry = LiveRegistry(f"http://127.0.0.1:{port}", signer)
        _wait_until_alive(registry.url, process, log)
        yield registry
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Front:
    """The front's end of a core: requests and calls go out, events and answers come in with the instant of each."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._num_calls = 0
        self.replies: dict[int, tuple[float, wire.Reply]] = {}
        """Call id to the monotonic instant of the answer and the answer."""

    def add(self, request_id: str, prompt: list[int], digest: str | None, max_tokens: int) -> None:
        """Start a greedy generation of exactly so many tokens."""
        params = wire.SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
        self._core.send(wire.AddRequest(request_id, prompt, params, digest))

    def abort(self, request_id: str) -> None:
        """End a generation."""
        self._core.send(wire.AbortRequest(request_id))

    def call(self, kind: Any, **fields: Any) -> int:
        """Send a call; its answer will be in `replies` under the returned id."""
        self._num_calls += 1
        self._core.send(kind(call_id=self._num_calls, **fields))
        return self._num_calls

    def hear(self, timeout_s: float) -> list[wire.TokenEvent]:
        """Take in one message, waiting for it at most so long; returns the events of its step."""
        message = self._core.try_receive(timeout_s)
        assert message is not None or self._core.process.poll() is None, "the core is dead"
        if isinstance(message, wire.Reply):
            self.replies[message.call_id] = (time.monotonic(), message)
        return message.events if isinstance(message, wire.TokenEvents) else []

    def wait(self, *call_ids: int) -> list[wire.Reply]:
        """Wait for the answers of calls, all of which must go well; what streams say meanwhile is lost."""
        deadline = time.monotonic() + _ANSWER_S
        while not all(call_id in self.replies for call_id in call_ids):
            assert time.monotonic() < deadline, "calls are not answered"
            self.hear(1.0)
        replies = [self.replies.pop(call_id)[1] for call_id in call_ids]
        assert all(reply.error is None for reply in replies), replies
        return replies

    def ask(self, kind: Any, **fields: Any) -> Any:
        """Send a call and wait for what it answers."""
        (reply,) = self.wait(self.call(kind, **fields))
        return reply.body

    def samples(self) -> dict[str, float]:
        """The core's metrics by sample name and labels."""
        lines = self.ask(wire.GetMetrics).decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


def loader_of(pid: int) -> int:
    """The loader process of a core."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"loraplex_engine.lora.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("the core has no loader process")


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_open_files(pid: int) -> int:
    """Descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _wait_until_alive(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/healthz", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"the registry did not start:\n{log.read_text()}")
