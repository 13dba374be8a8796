"""What the gateway adds to a request and to a token: `make bench_gateway`, three minutes; ARGS=--quick, some seconds.

The same requests go to an engine that replays recorded bytes, directly and through the gateway, in turn; they come by a
Poisson process, so some come together. The gateway has a core to itself; engine and client share the other one and one
clock. With `--database-url` and `--redis-url` it is one gateway of several, else the only one, on SQLite.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvloop
from record import RECORDINGS
from replay import Client, Recording, Replay, Trace
from report import Progress, Report, build_parser, parse_options, percentile

from gateway_world import ADMIN_KEY, GatewayWorld, register_base
from loraplex.app import running_gateway
from loraplex.gateway.server import GatewayServer
from loraplex.settings import Settings
from scripted_engine import FINGERPRINT

_RATE_HZ = 100.0
_NUM_TOKENS = 32
_GAP_S = 0.01
_NUM_PAIRS, _PART_S, _WARM_S = 5, 6.0, 1.0
_NUM_CONNECTIONS = 64
_KINDS = ("whole", "stream")
_TENANT = "team-bench"
_MS = 1e3
_STATE = {
    "is_ready": True,
    "is_draining": False,
    "waiting": 0,
    "running": 0,
    "slots": [],
    "model": {"name": "tiny", "fingerprint": FINGERPRINT, "max_lora_rank": 64},
    "failed": {},
    "quarantined": {},
}
_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Part:
    """What was seen in one part of a run: traces in the order of their requests, and the gateway's CPU seconds."""

    traces: Sequence[Trace]
    cpu_s: float

    def ms(self, percent: float) -> float:
        """Percentile of whole requests."""
        return percentile([_MS * trace.seconds for trace in self.traces], percent)

    def first_ms(self, percent: float) -> float:
        """Percentile of the first token."""
        return percentile([_MS * trace.first_s for trace in self.traces], percent)

    def delay_ms(self, percent: float) -> float:
        """Percentile of how long a token was on its way."""
        return percentile(self._delays_ms(), percent)

    def mean_delay_ms(self) -> float:
        """Mean of it."""
        return statistics.fmean(self._delays_ms())

    def _delays_ms(self) -> list[float]:
        """Of all tokens but the first ones, which belong to their requests."""
        return [_MS * delay for trace in self.traces for delay in trace.delays_s[1:]]


def serve_gateway(folder: Path, listener: socket.socket, fields: dict[str, Any], core: int) -> None:
    """The gateway's process on its core, with a tenant and its adapter; writes down key and digest when it serves."""
    os.sched_setaffinity(0, {core})

    async def serve() -> None:
        async with running_gateway(Settings(**fields)) as gateway:
            serving = asyncio.create_task(GatewayServer(gateway.app, gateway.drain, 1).serve(sockets=[listener]))
            world = GatewayWorld(gateway, f"http://127.0.0.1:{listener.getsockname()[1]}", [], folder)
            await register_base(world)
            await world.create_tenant(_TENANT)
            key, version = await world.create_key(_TENANT), await world.push(_TENANT)
            await world.http.aclose()
            (folder / "ready.tmp").write_text(json.dumps({"key": key, "digest": version["digest"]}))
            (folder / "ready.tmp").rename(folder / "ready")
            await serving

    uvloop.run(serve())


async def run_part(client: Client, replay: Replay, pid: int, kind: str, seconds: float, seed: int) -> Part:
    """Send requests of one kind for so long, and wait for all answers; the first second is not counted."""
    chance = random.Random(seed)
    base = {"model": _TENANT, "messages": [{"role": "user", "content": "Where is the nearest harbour?"}]}
    base |= {"max_tokens": _NUM_TOKENS, "temperature": 0, "stream": kind == "stream"}
    began_at, due_s, tasks, counted = time.perf_counter(), 0.0, [], []
    cpu_s = 0.0
    replay.traces.clear()
    await client.open(_NUM_CONNECTIONS)
    while (due_s := due_s + chance.expovariate(_RATE_HZ)) < _WARM_S + seconds:
        await asyncio.sleep(max(0.0, began_at + due_s - time.perf_counter()))
        trace = replay.traces[len(tasks)] = Trace()
        if due_s >= _WARM_S:
            cpu_s = cpu_s or cpu_seconds(pid)
            counted.append(trace)
        body = json.dumps({**base, "seed": len(tasks)}).encode()
        tasks.append(asyncio.create_task(client.send("/v1/chat/completions", body, trace)))
    await asyncio.gather(*tasks)
    client.close()
    for trace in counted:
        assert trace.status == 200, trace
        assert kind == "whole" or len(trace.arrived_at) == len(trace.sent_at) >= _NUM_TOKENS, trace
    return Part(counted, cpu_seconds(pid) - cpu_s)


def cpu_seconds(pid: int) -> float:
    """CPU that all threads of a process have used."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def measure(
    options: argparse.Namespace, folder: Path, engine: socket.socket, ports: dict[str, int], pid: int
) -> dict[tuple[str, str], list[Part]]:
    """Return the parts by kind and way."""
    facts = json.loads((folder / "ready").read_text())
    whole, stream = (Recording.read(RECORDINGS / f"{kind}.http", facts["digest"]) for kind in _KINDS)
    replay = Replay(whole, stream, json.dumps(_STATE).encode(), _GAP_S)
    server = await asyncio.get_running_loop().create_server(replay.build_connection, sock=engine)
    await asyncio.sleep(2.5)  # until the gateway has seen the engine
    parts: dict[tuple[str, str], list[Part]] = {(kind, way): [] for kind in _KINDS for way in ports}
    num_pairs, seconds = (1, 0.5) if options.quick else (options.pairs, _PART_S)
    progress = Progress("pairs", num_pairs)
    for pair in range(num_pairs):
        ways = list(ports)[:: 1 if pair % 2 else -1]
        for kind in _KINDS:
            for way in ways:
                client = Client(ports[way], facts["key"])
                parts[kind, way].append(await run_part(client, replay, pid, kind, seconds, pair))
        progress.update(pair + 1)
    server.close()
    return parts


def tell(report: Report, parts: dict[tuple[str, str], list[Part]]) -> None:
    """Print what the gateway adds: medians over pairs of the differences within them."""

    def added(kind: str, figure: Callable[..., float], *args: float) -> float:
        pairs = zip(parts[kind, "gateway"], parts[kind, "engine"], strict=True)
        return statistics.median(figure(ours, *args) - figure(theirs, *args) for ours, theirs in pairs)

    rows = []
    for name, kind, figure in (
        ("whole answer", "whole", Part.ms),
        ("first token", "stream", Part.first_ms),
        ("whole stream", "stream", Part.ms),
    ):
        each = [percentile([figure(part, 50) for part in parts[kind, way]], 50) for way in ("engine", "gateway")]
        rows.append([name, *each, *(added(kind, figure, percent) for percent in (50, 95, 99))])
    report.table(["ms", "engine p50", "gateway p50", "added p50", "added p95", "added p99"], rows)
    tokens = [added("stream", Part.delay_ms, percent) for percent in (50, 95, 99)]
    mean = added("stream", Part.mean_delay_ms)
    report.table(["ms a token", "mean", "p50", "p95", "p99"], [["added", mean, *tokens]])
    whole, stream = (
        statistics.median(part.cpu_s / len(part.traces) for part in parts[kind, "gateway"]) for kind in _KINDS
    )
    token = (stream - whole) / (_NUM_TOKENS - 1)
    report.table(["ms of CPU in the gateway", "request", "token"], [["", _MS * whole, _MS * token]])
    report.check("a whole answer, p50, ms", rows[0][3], at_most=3.0)
    report.check("the first token of a stream, p50, ms", rows[1][3], at_most=3.0)
    report.check("a whole stream, p50, ms", rows[2][3], at_most=3.0 + 0.2 * _NUM_TOKENS)
    report.check("a token on its way, mean, ms", mean, at_most=0.2)
    report.check("a token, CPU, ms", _MS * token, at_most=0.2)


def main() -> int:
    """Measure and report."""
    parser = build_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=_NUM_PAIRS)
    parser.add_argument("--database-url", help="an empty database on a Postgres server")
    parser.add_argument("--redis-url", help="a Redis server that nobody else uses")
    options = parse_options(parser)
    report = Report("gateway", options)
    first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as name,
        socket.create_server(("127.0.0.1", 0)) as engine,
        socket.create_server(("127.0.0.1", 0), backlog=512) as gateway,
    ):
        folder = Path(name)
        ports = {way: bound.getsockname()[1] for way, bound in (("engine", engine), ("gateway", gateway))}
        database = options.database_url or f"sqlite+aiosqlite:///{folder}/db.sqlite"
        upgrade = [sys.executable, "-m", "loraplex", "db", "upgrade"]
        subprocess.run(upgrade, check=True, capture_output=True, env={**os.environ, "LORAPLEX_DATABASE_URL": database})
        fields = {
            "database_url": database,
            "redis_url": options.redis_url,
            "object_store_url": f"file://{folder}/objects",
            "data_dir": folder,
            "pools": json.dumps({"main": {"base": "tiny", "engines": [f"http://127.0.0.1:{ports['engine']}"]}}),
            "admin_key": ADMIN_KEY,
            "engine_key": "the-engine-key",
            "parity_gate": "off",
            "warm_s": 0.0,
        }
        process = _spawn.Process(target=serve_gateway, args=(folder, gateway, fields, first), daemon=True)
        process.start()
        try:
            while not (folder / "ready").exists():
                assert process.is_alive(), "the gateway did not start"
                time.sleep(0.1)
            os.sched_setaffinity(0, {last})
            assert process.pid is not None
            tell(report, uvloop.run(measure(options, folder, engine, ports, process.pid)))
        finally:
            process.kill()
            process.join()
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
