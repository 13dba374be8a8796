"""CPU of front and gateway per token: `python tests/bench/bench_relay.py [--quick]`, a minute; `make bench_relay`.

Both are processes of their own, as they serve. The core is a script that sends one message of tokens per step, a little
faster than an engine does, and the clients only read: so what the two burn is what tokens cost on their way out.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvloop
import zmq
import zmq.asyncio
from report import Report, build_parser, follow, parse_options

from gateway_world import ADMIN_KEY, GatewayWorld, register_base
from loraplex.app import running_gateway
from loraplex.gateway.server import GatewayServer
from loraplex.settings import Settings
from loraplex_engine.server.core_client import CoreClient
from loraplex_engine.server.core_process import CoreLink
from loraplex_engine.server.front import Front
from loraplex_engine.server.process import build_server
from loraplex_engine.server.tokenizer import Tokenizer
from loraplex_engine.wire import messages as wire
from loraplex_registry.wire.identity import TokenSigner, TokenVerifier, generate_signing_key
from scripted_core import build_facts
from scripted_engine import FINGERPRINT
from toy_tokenizers import write_byte_level

_NUM_STREAMS = 16
_STEP_S = 0.006
_NUM_STEPS, _NUM_QUICK_STEPS, _NUM_WARM = 500, 60, 20
_NUM_ROUNDS = 5
_KINDS: dict[str, dict[str, Any]] = {"plain": {}, "logprobs 5": {"logprobs": 5}}
_spawn = multiprocessing.get_context("spawn")


def serve_front(folder: Path, listener: socket.socket, key: bytes) -> None:
    """The front's process: everything but the start of a core."""

    async def serve() -> None:
        client = CoreClient()
        server = build_server(Front(Tokenizer(folder / "base"), client), TokenVerifier([key], "engine"))
        link = CoreLink(zmq.asyncio.Context(), folder, 0)
        client.attach(link.send)
        await asyncio.gather(link.pump(client.receive), server.serve(sockets=[listener]))

    uvloop.run(serve())


def serve_gateway(folder: Path, listener: socket.socket, settings: Settings) -> None:
    """The gateway's process, with the tiny base registered; it says so with a file."""

    async def serve() -> None:
        async with running_gateway(settings) as gateway:
            serving = asyncio.create_task(GatewayServer(gateway.app, gateway.drain, 1).serve(sockets=[listener]))
            world = GatewayWorld(gateway, url_of(listener), [], folder)
            await register_base(world)
            await world.http.aclose()
            (folder / "ready").touch()
            await serving

    uvloop.run(serve())


class ScriptedSteps:
    """The core: answers calls from a thread, and sends a step's tokens when told to."""

    def __init__(self, folder: Path) -> None:
        context = zmq.Context.instance()
        self._inbox, self._outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._inbox.connect(f"ipc://{folder}/0-to-core")
        self._outbox.connect(f"ipc://{folder}/0-to-front")
        self._lock = threading.Lock()
        self.running: dict[str, wire.SamplingParams] = {}
        self._send(build_facts(fingerprint=FINGERPRINT, max_model_len=8192))
        threading.Thread(target=self._hear, daemon=True).start()

    def step(self, number: int, finish: str | None = None) -> None:
        """One token for each request that runs."""
        stats = wire.RequestStats(1, 0, number, 0.0, 0.1, 0.0, 0.1, 0) if finish else None
        events = []
        for index, (request_id, params) in enumerate(list(self.running.items())):
            told = [] if params.logprobs is None else [_tell(params.logprobs)]
            events.append(wire.TokenEvent(request_id, [10 + (number + index) % 80], finish, None, stats, told))
        self._send(wire.TokenEvents(events))
        if finish:
            self.running.clear()

    def _send(self, message: wire.ToFront) -> None:
        with self._lock:
            self._outbox.send(wire.encode(message))

    def _hear(self) -> None:
        while True:
            message = wire.decode_to_core(self._inbox.recv())
            if isinstance(message, wire.AddRequest):
                self.running[message.request_id] = message.params
            elif not isinstance(message, wire.AbortRequest):
                self._send(wire.Reply(message.call_id, {"waiting": 0, "running": 0, "slots": []}))


class Readers:
    """Clients of one address that read whatever comes; the block ends when all answers have."""

    def __init__(self, listener: socket.socket, token: str, fields: dict[str, Any]) -> None:
        body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 8000, "stream": True, **fields}).encode()
        lines = ["POST /v1/completions HTTP/1.1", "host: e", f"authorization: Bearer {token}", "connection: close"]
        lines += ["content-type: application/json", f"content-length: {len(body)}", "", ""]
        self._sockets = [socket.create_connection(listener.getsockname()) for _ in range(_NUM_STREAMS)]
        for client in self._sockets:
            client.sendall("\r\n".join(lines).encode() + body)
            client.setblocking(False)
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for client in self._sockets:
                selector.register(client, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    client = key.fileobj
                    assert isinstance(client, socket.socket)
                    if not client.recv(1 << 16):
                        selector.unregister(client)
                        client.close()


def measure(steps: ScriptedSteps, readers: Readers, pids: list[int], num_steps: int) -> list[float]:
    """Microseconds of CPU per token, of each process."""
    with readers:
        while len(steps.running) < _NUM_STREAMS:
            time.sleep(0.01)
        for number in range(_NUM_WARM):
            steps.step(number)
            time.sleep(_STEP_S)
        before, began_at = [cpu_seconds(pid) for pid in pids], time.monotonic()
        for number in range(num_steps):
            steps.step(number)
            time.sleep(max(0.0, began_at + (number + 1) * _STEP_S - time.monotonic()))
        after = [cpu_seconds(pid) for pid in pids]
        steps.step(num_steps, "length")
    num_tokens = num_steps * _NUM_STREAMS
    return [1e6 * (end - begin) / num_tokens for begin, end in zip(before, after, strict=True)]


def cpu_seconds(pid: int) -> float:
    """CPU that all threads of a process have used."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def url_of(listener: socket.socket) -> str:
    """The URL of a socket on the loopback."""
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def _tell(num_top: int) -> wire.TokenLogprobs:
    return wire.TokenLogprobs(-0.12345678, [(20 + index, -0.5 - index) for index in range(num_top)])


@contextmanager
def _running(target: Any, *args: Any) -> Iterator[int]:
    process = _spawn.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join()


def main() -> int:
    """Measure both ways in turn and report the medians."""
    options = parse_options(build_parser(__doc__))
    report = Report("relay", options)
    num_steps = _NUM_QUICK_STEPS if options.quick else _NUM_STEPS
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine, gateway = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        key = generate_signing_key()
        signer = TokenSigner(key)
        write_byte_level(folder / "base")
        database = f"sqlite+aiosqlite:///{folder}/db.sqlite"
        upgrade = [sys.executable, "-m", "loraplex", "db", "upgrade"]
        subprocess.run(upgrade, check=True, capture_output=True, env={**os.environ, "LORAPLEX_DATABASE_URL": database})
        settings = Settings(
            database_url=database,
            object_store_url=f"file://{folder}/objects",
            data_dir=folder,
            pools=json.dumps({"main": {"base": "tiny", "engines": [url_of(engine)]}}),
            admin_key=ADMIN_KEY,
            engine_key="the-engine-key",
            signing_key=key.decode(),
        )
        front_pid = stack.enter_context(_running(serve_front, folder, engine, signer.public_pem))
        steps = ScriptedSteps(folder)
        gateway_pid = stack.enter_context(_running(serve_gateway, folder, gateway, settings))
        while not (folder / "ready").exists():
            time.sleep(0.1)
        for kind, fields in _KINDS.items():
            rounds = [
                measure(steps, Readers(gateway, ADMIN_KEY, fields), [front_pid, gateway_pid], num_steps)
                for _ in follow(range(1 if options.quick else _NUM_ROUNDS), kind)
            ]
            rows.append([kind, *(statistics.median(column) for column in zip(*rounds, strict=True))])
    report.table(["us of CPU per token", "front", "gateway"], rows)
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
