"""24 adapters on three engines of eight slots: `python tests/bench/bench_affinity.py [--quick]`, about 10 minutes.

Adapters are asked for by Zipf's law (exponent 1), by clients that send as soon as they are answered. Rounds go in
pairs, one placed as the gateway does, one to each engine in turn; each begins with nothing loaded, and its first
requests, which must load everything, are told apart. Engines keep no more adapters in host memory than in slots, so
that each load is a whole one, from disk. A last round asks for one adapter most of the time and says where it went.

The base is a small random one and all engines share the machine with the gateway: loads per request are what a real
fleet would see, milliseconds are not.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Report, build_parser, parse_options, percentile
from setting import SEVEN

from fleet_world import FleetWorld, running_fleet
from gateway_world import ADMIN_KEY
from loraplex.fleet.placement import Outlook, Placement, Wish, find_able, place
from loraplex.fleet.traffic import Traffic
from loraplex.fleet.view import FleetView
from loraplex_registry.app import upgrade
from support import tiny_llama_config, write_base

_TENANT = "bench"
_NUM_ADAPTERS, _NUM_REPLICAS, _NUM_SLOTS = 24, 3, 8
_NUM_CLIENTS = 24
_NUM_WARM, _NUM_REQUESTS = 150, 450
_HOT_SHARE = 0.6
_PROMPT_WORDS, _MAX_TOKENS = 24, 24
_LOADS = 'loraplex_adapter_loads_total{result="ok",stage="pack"}'
_BASE = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 32}


@dataclass
class Seen:
    """What the clients of one load saw; milliseconds."""

    first_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Round:
    """One round; `loads` are those after the first requests, `first_loads` the ones before."""

    seen: Seen
    loads: float
    first_loads: float

    @property
    def loads_per_request(self) -> float:
        """Once everything is warm."""
        return self.loads / len(self.seen.models)


class Turns:
    """Each able replica in turn, whatever it holds."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __call__(self, wish: Wish, view: FleetView, outlook: Outlook, exclude: Sequence[str]) -> Placement | None:
        """Choose as `place` does."""
        able = find_able(wish.base, wish.rank, view, outlook.ejected, exclude)
        return Placement(able[next(self._numbers) % len(able)], "resident") if able else None


def send_load(url: str, models: Sequence[str], seed: int) -> Seen:
    """Ask for the models in order, `_NUM_CLIENTS` at a time; the clients' own process."""
    import httpx

    async def ask(client: httpx.AsyncClient, model: str, rng: random.Random, seen: Seen) -> None:
        prompt = " ".join(rng.choice(("red", "blue", "tree", "house")) for _ in range(_PROMPT_WORDS))
        body = {"model": model, "prompt": prompt, "max_tokens": _MAX_TOKENS, "ignore_eos": True, "stream": True}
        began_at, first_at = time.perf_counter(), None
        async with client.stream("POST", "/v1/completions", json=body) as response:
            last = b""
            async for chunk in response.aiter_raw():
                first_at = first_at or time.perf_counter()
                last = chunk
            if response.status_code != 200 or not last.endswith(b"data: [DONE]\n\n"):
                seen.errors.append(f"{response.status_code} {last[-200:]!r}")
                return
        assert first_at is not None
        seen.first_ms.append(1e3 * (first_at - began_at))
        seen.total_ms.append(1e3 * (time.perf_counter() - began_at))
        seen.replicas.append(response.headers["x-loraplex-replica"])
        seen.models.append(model)

    async def run() -> Seen:
        queue, rng, seen = iter(models), random.Random(seed), Seen()

        async def work(client: httpx.AsyncClient) -> None:
            for model in queue:
                await ask(client, model, rng, seen)

        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300, trust_env=False) as client:
            began_at = time.perf_counter()
            await asyncio.gather(*(work(client) for _ in range(_NUM_CLIENTS)))
            seen.seconds = time.perf_counter() - began_at
        return seen

    return asyncio.run(run())


class Bench:
    """The fleet, and the process of its clients."""

    def __init__(self, world: FleetWorld, clients: ProcessPoolExecutor, scale: float) -> None:
        self._world = world
        self._clients = clients
        self._scale = scale
        self._plan_loads = world.gateway.fleet.plan_loads
        self._models = [f"{_TENANT}/a{index}" for index in range(_NUM_ADAPTERS)]
        self._weights = [1 / (index + 1) for index in range(_NUM_ADAPTERS)]

    async def run(self, seed: int, *, takes_turns: bool, weights: Sequence[float] | None = None) -> Round:
        """Begin with nothing loaded, and send a load."""
        fleet = self._world.gateway.fleet
        fleet.place = Turns() if takes_turns else place
        # mypy: the one other way to have none would be a switch that nobody needs
        fleet.plan_loads = list if takes_turns else self._plan_loads  # type: ignore[method-assign, assignment]
        await self._start_anew()
        rng = random.Random(seed)
        models = rng.choices(self._models, weights or self._weights, k=int((_NUM_WARM + _NUM_REQUESTS) * self._scale))
        num_warm = int(_NUM_WARM * self._scale)
        start = await self._count_loads()
        warm = await self._send(models[:num_warm], seed)
        middle = await self._count_loads()
        seen = await self._send(models[num_warm:], seed + 1)
        seen.errors += warm.errors
        return Round(seen, await self._count_loads() - middle, middle - start)

    async def _send(self, models: Sequence[str], seed: int) -> Seen:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._clients, send_load, self._world.url, models, seed)

    async def _start_anew(self) -> None:
        """Start all engines again: an adapter that is dropped by a call would not stay for a minute."""
        fleet = self._world.gateway.fleet
        for process in self._world.processes:
            process.kill()
        await fleet.poll()
        fleet.traffic = Traffic()
        for process in self._world.processes:
            process.start()
        await self._world.wait_serving(_NUM_REPLICAS)
        assert not any(replica.resident for replica in fleet.view.replicas)

    async def _count_loads(self) -> float:
        total = 0.0
        for process in self._world.processes:
            text = await self._world.gateway.fleet.client(process.url).metrics()
            lines = [line for line in text.splitlines() if line.startswith(_LOADS)]
            total += sum(float(line.rsplit(" ", 1)[1]) for line in lines)
        return total


def report_pairs(report: Report, ours: Sequence[Round], turns: Sequence[Round]) -> None:
    """Print the medians over the pairs, and hold them against the targets."""

    def describe(name: str, rounds: Sequence[Round]) -> list[object]:
        def median(values: Any) -> float:
            return statistics.median(values)

        return [
            name,
            median(one.loads_per_request for one in rounds),
            median(one.first_loads for one in rounds),
            median(percentile(one.seen.first_ms, 50) for one in rounds),
            median(percentile(one.seen.first_ms, 95) for one in rounds),
            median(percentile(one.seen.total_ms, 95) for one in rounds),
            median(len(one.seen.models) / one.seen.seconds for one in rounds),
            min(min(shares(one.seen)) for one in rounds),
        ]

    header = [
        "placement",
        "loads/request",
        "first loads",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "total p95 ms",
        "requests/s",
        "least share",
    ]
    rows = [describe("as the gateway does", ours), describe("in turn", turns)]
    report.table(header, rows)
    fewer = [their.loads_per_request / max(our.loads_per_request, 1e-9) for our, their in zip(ours, turns, strict=True)]
    report.check("times fewer loads per request, median of pairs", statistics.median(fewer), at_least=5.0)
    p95 = [
        percentile(our.seen.first_ms, 95) / percentile(their.seen.first_ms, 95)
        for our, their in zip(ours, turns, strict=True)
    ]
    report.check("TTFT p95 against in turn, median of pairs", statistics.median(p95), at_most=1.0)


def shares(seen: Seen) -> list[float]:
    """Each replica's part of the answers; 0 for those that gave none."""
    counts = [seen.replicas.count(name) / len(seen.replicas) for name in sorted(set(seen.replicas))]
    return counts + [0.0] * (_NUM_REPLICAS - len(counts))


async def main(options: Any) -> int:
    report = Report("affinity", options)
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients:
        folder = Path(name)
        config = tiny_llama_config(**({} if options.quick else _BASE))
        base = write_base(folder / "small", config)
        url = f"sqlite+aiosqlite:///{folder}/loraplex.db"
        upgrade(url)
        flags = ("--max-loras", str(_NUM_SLOTS), "--max-cpu-loras", str(_NUM_SLOTS), "--cpu-threads", "1")
        async with running_fleet(url, folder, _NUM_REPLICAS, *flags, base=base) as world:
            await world.add_adapters(_TENANT, _NUM_ADAPTERS, rank=8 if options.quick else 32, targets=SEVEN)
            bench = Bench(world, clients, 0.3 if options.quick else 1.0)
            ours, turns = [], []
            for pair in range(1 if options.quick else options.pairs):
                for takes_turns in (False, True) if pair % 2 == 0 else (True, False):
                    (turns if takes_turns else ours).append(await bench.run(100 * pair, takes_turns=takes_turns))
                print(f"pair {pair + 1}: {ours[-1].loads_per_request:.3f} against {turns[-1].loads_per_request:.3f}")
            report_pairs(report, ours, turns)
            rest = [(1 - _HOT_SHARE) / (_NUM_ADAPTERS - 1)] * (_NUM_ADAPTERS - 1)
            hot = await bench.run(7, takes_turns=False, weights=[_HOT_SHARE, *rest])
            digest = world.digests[f"{_TENANT}/a0"]
            holders = sum(digest in replica.resident for replica in world.gateway.fleet.view.replicas)
            of_hot = [
                replica
                for replica, model in zip(hot.seen.replicas, hot.seen.models, strict=True)
                if model == f"{_TENANT}/a0"
            ]
            parts = sorted(of_hot.count(name) / len(of_hot) for name in set(of_hot))
            text = ", ".join(f"{part:.0%}" for part in parts)
            report.say("hot_shares", parts, f"\na hot adapter with {_HOT_SHARE:.0%} of all requests: {text} of its own")
            report.check("replicas that hold the hot adapter", holders, at_least=2)
            report.check("part of the busiest replica in the hot round", max(shares(hot.seen)), at_most=0.5)
            errors = [error for one in (*ours, *turns, hot) for error in one.seen.errors]
            report.check("failed requests", len(errors), at_most=0)
            print(*errors[:3], sep="\n")
    return report.close()


if __name__ == "__main__":
    parser = build_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="rounds of each kind")
    sys.exit(asyncio.run(main(parse_options(parser))))
