"""More adapters than slots: `python tests/bench/bench_slots.py [--quick] [--http]`, about 15 minutes.

Measures what the engine can do with eight adapters in eight slots, sixteen clients that send as soon as they are
answered. Then requests arrive by themselves (Poisson) at half that rate: eight adapters in eight slots, sixteen in
eight, sixteen by Zipf's law. An answer's first token is timed from the planned arrival, so a late one counts in full.
"Slot wait" is the longest that a request's adapter had no slot; the engine's state says the bound that it keeps.
Every adapter is in host memory before: this is about slots, `bench_loads.py` is about loads. The engine runs in this
process, in one thread, without HTTP; `--http` asks a whole platform (`loraplex up`) instead.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Progress, Report, build_parser, follow, parse_options, percentile
from setting import SEVEN, Recipe, open_base, random_ids

from engines import EngineWorld
from loraplex.client.upload import list_files
from platforms import LivePlatform, running_platform

_NUM_SLOTS = 8
_NUM_ADAPTERS = 16
_NUM_CLIENTS = 16
_PATIENCE_S = 0.002
_TENANT = "bench"


@dataclass(frozen=True)
class Arrival:
    """A request to come: seconds after the phase's start, which adapter, what it asks."""

    at_s: float
    adapter: int
    prompt: list[int]


@dataclass
class Outcome:
    """What became of a request; seconds after the phase's start."""

    arrival: Arrival
    first_at_s: float | None = None
    ended_at_s: float | None = None
    error: str | None = None
    slot_wait_ms: float = float("nan")
    """How long its adapter had no slot; over HTTP nobody says."""

    @property
    def ttft_ms(self) -> float:
        """From the planned arrival to the first token."""
        assert self.first_at_s is not None
        return 1e3 * (self.first_at_s - self.arrival.at_s)


class Source(Protocol):
    """Who sends requests."""

    seconds: float

    def take(self, now_s: float, num_open: int) -> list[Arrival]:
        """The requests that are due now."""

    def is_over(self, now_s: float) -> bool:
        """Whether nothing comes any more."""


class OpenLoop:
    """Requests that come when they come."""

    def __init__(self, arrivals: Sequence[Arrival], seconds: float) -> None:
        self.seconds = seconds
        self._left = sorted(arrivals, key=lambda arrival: arrival.at_s, reverse=True)

    def take(self, now_s: float, num_open: int) -> list[Arrival]:
        due = []
        while self._left and self._left[-1].at_s <= now_s:
            due.append(self._left.pop())
        return due

    def is_over(self, now_s: float) -> bool:
        return not self._left


class ClosedLoop:
    """Clients that send again as soon as they are answered, the adapters in turn."""

    def __init__(self, seconds: float, num_adapters: int, ask: Callable[[], list[int]]) -> None:
        self.seconds = seconds
        self._num_adapters = num_adapters
        self._ask = ask
        self._num_sent = 0

    def take(self, now_s: float, num_open: int) -> list[Arrival]:
        due = []
        while num_open + len(due) < _NUM_CLIENTS and not self.is_over(now_s):
            due.append(Arrival(now_s, self._num_sent % self._num_adapters, self._ask()))
            self._num_sent += 1
        return due

    def is_over(self, now_s: float) -> bool:
        return now_s >= self.seconds


class Server(Protocol):
    """What is measured."""

    def serve(self, source: Source, progress: Progress) -> list[Outcome]:
        """Let the source send, and wait until all is answered."""

    def num_evictions(self) -> int:
        """Adapters that had to leave a slot so far."""

    def state(self) -> dict[str, Any]:
        """What `GET /internal/state` says now."""


class EngineServer:
    """The engine in this process, driven as its own loop drives it."""

    def __init__(self, world: EngineWorld, digests: Sequence[str], num_tokens: int) -> None:
        self._world = world
        self._digests = digests
        self._num_tokens = num_tokens
        self.name = f"the engine alone, {world.engine.facts.dtype}, {world.engine.facts.ops} ops"

    def serve(self, source: Source, progress: Progress) -> list[Outcome]:
        engine, outcomes, num_open = self._world.engine, dict[str, Outcome](), 0
        started_at = time.monotonic()
        while True:
            now_s = time.monotonic() - started_at
            for arrival in source.take(now_s, num_open):
                request = self._world.request(arrival.prompt, self._digests[arrival.adapter], self._num_tokens)
                outcomes[request.request_id] = Outcome(arrival)
                engine.add(request)
                num_open += 1
            if num_open == 0 and source.is_over(now_s):
                return list(outcomes.values())
            events = engine.step()
            now_s = time.monotonic() - started_at
            progress.update(now_s)
            for event in events:
                outcome = outcomes[event.request_id]
                if event.token_ids and outcome.first_at_s is None:
                    outcome.first_at_s = now_s
                if event.finish:
                    outcome.ended_at_s = now_s
                    outcome.slot_wait_ms = 1e3 * event.stats.load_s if event.stats else 0.0
                    outcome.error = event.error.code if event.error else None
                    num_open -= 1
            if not engine.has_running:
                time.sleep(_PATIENCE_S)

    def num_evictions(self) -> int:
        return self._world.engine.residency.slots.num_evictions

    def state(self) -> dict[str, Any]:
        return self._world.engine.state()


class PlatformServer:
    """A whole platform, asked over HTTP by streaming clients."""

    def __init__(self, platform: LivePlatform, num_tokens: int) -> None:
        self._platform = platform
        self._num_tokens = num_tokens
        self.name = "a platform over HTTP"

    def serve(self, source: Source, progress: Progress) -> list[Outcome]:
        return asyncio.run(self._serve(source, progress))

    async def _serve(self, source: Source, progress: Progress) -> list[Outcome]:
        outcomes: list[Outcome] = []
        tasks: set[asyncio.Task[None]] = set()
        headers = {"authorization": f"Bearer {self._platform.admin_key}"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._platform.url, headers=headers, timeout=300, limits=limits, trust_env=False
        ) as http:
            started_at = time.monotonic()
            while tasks or not source.is_over(time.monotonic() - started_at):
                now_s = time.monotonic() - started_at
                for arrival in source.take(now_s, len(tasks)):
                    outcomes.append(Outcome(arrival))
                    task = asyncio.create_task(self._ask(http, outcomes[-1], started_at))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                progress.update(now_s)
                await asyncio.sleep(_PATIENCE_S)
        return outcomes

    async def _ask(self, http: httpx.AsyncClient, outcome: Outcome, started_at: float) -> None:
        body = {
            "model": f"{_TENANT}/a{outcome.arrival.adapter}",
            "prompt": outcome.arrival.prompt,
            "max_tokens": self._num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    outcome.error = f"{response.status_code} {(await response.aread())[:200]!r}"
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data: {") and outcome.first_at_s is None:
                        outcome.first_at_s = time.monotonic() - started_at
                    if '"error"' in line:
                        outcome.error = line[:200]
        except httpx.HTTPError as error:
            outcome.error = repr(error)
        outcome.ended_at_s = time.monotonic() - started_at

    def num_evictions(self) -> int:
        return int(self._platform.engine_metrics()['loraplex_adapter_evictions_total{tier="slot"}'])

    def state(self) -> dict[str, Any]:
        return self._platform.engine_state()


def main() -> int:
    """Measure, print, and say whether the cliff is gone."""
    parser = build_parser(__doc__)
    parser.add_argument("--http", action="store_true", help="measure a whole platform over HTTP")
    parser.add_argument("--seconds", type=float, default=180.0, help="of each open loop")
    parser.add_argument("--closed-seconds", type=float, default=60.0, help="of each closed loop")
    parser.add_argument("--slices", type=int, default=1, help="parts of the open loops, which then alternate")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters, on all seven modules")
    options = parse_options(parser)
    if options.quick:
        options.seconds, options.closed_seconds, options.tokens, options.slices = 3.0, 2.0, 8, 2
    report = Report("slots", options)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        base = open_base(options.base, Path(folder), is_tiny=options.quick)
        build = build_platform if options.http else build_engine
        Bench(report, options, build(options, base, Path(folder), stack)).run()
    return report.close()


def build_engine(options: argparse.Namespace, base: Path, folder: Path, stack: ExitStack) -> EngineServer:
    """The engine with eight slots, and the adapters it can load."""
    world = EngineWorld(
        base,
        folder / "cache",
        dtype=options.dtype,
        cpu_threads=options.threads,
        max_loras=_NUM_SLOTS,
        kv_cache_memory_bytes=1 << 30,
        queue_timeout_s=600.0,
        adapter_load_timeout_s=600.0,
    )
    digests = [world.put(source) for source in write_adapters(options, base, folder)]
    return EngineServer(world, digests, options.tokens)


def build_platform(options: argparse.Namespace, base: Path, folder: Path, stack: ExitStack) -> PlatformServer:
    """A platform with eight slots and a tenant that has the adapters."""
    flags = ["--base", str(base), "--max-loras", str(_NUM_SLOTS), "--dtype", options.dtype]
    flags += ["--cpu-threads", str(options.threads)] if options.threads else []
    platform = stack.enter_context(running_platform(folder / "data", *flags))
    with platform.management() as client:
        client.create_tenant(_TENANT)
        for index, source in enumerate(write_adapters(options, base, folder)):
            version = client.push(_TENANT, f"a{index}", list_files(source), lambda _: None)
            assert version.state == "ready", version
    return PlatformServer(platform, options.tokens)


def write_adapters(options: argparse.Namespace, base: Path, folder: Path) -> list[Path]:
    """Sixteen adapters on all seven modules."""
    recipe = Recipe(options.rank, SEVEN)
    return [
        recipe.write(folder / "adapters" / f"a{seed}", base, seed) for seed in follow(range(_NUM_ADAPTERS), "adapters")
    ]


class Bench:
    """The phases, in turn, on one server."""

    def __init__(self, report: Report, options: argparse.Namespace, server: EngineServer | PlatformServer) -> None:
        self._report = report
        self._options = options
        self._server = server
        self._rng = random.Random(0)
        self._rows: list[tuple[object, ...]] = []
        self._state: dict[str, Any] = {}

    def run(self) -> None:
        """Measure all phases and report."""
        server, options = self._server, self._options
        self._report.say(
            "server",
            server.name,
            f"{server.name}; rank {options.rank} on all seven modules, {_NUM_SLOTS} slots, "
            f"{options.prompt_tokens} tokens in, {options.tokens} out",
        )
        rate = self._measure_capacity() / 2
        p95_ms = self._run_open_loops(rate)
        self._run_closed(f"closed loop of {_NUM_CLIENTS}, 16 in 8", _NUM_ADAPTERS)
        header = (
            "time to first token, ms",
            "requests",
            "errors",
            "req/s",
            "p50",
            "p95",
            "p99",
            "max",
            "slot wait",
            "evictions",
        )
        self._report.table(header, self._rows)
        schedule = self._state["slot_schedule"]
        self._report.say("slot_schedule", schedule, f"\nslot_schedule in the middle of 16 in 8: {schedule}")
        for name in ("16 in 8", "16 in 8, Zipf 1.0"):
            ratio = p95_ms[name] / p95_ms["8 in 8"]
            self._report.check(f"TTFT p95, {name} over 8 in 8, half of the capacity", ratio, at_most=3.0)
        self._report.check("requests that failed", sum(int(str(row[2])) for row in self._rows), at_most=0.0)

    def _measure_capacity(self) -> float:
        outcomes = self._run_closed(f"closed loop of {_NUM_CLIENTS}, 8 in 8", _NUM_SLOTS)
        num_done = sum((outcome.ended_at_s or 0.0) <= self._options.closed_seconds for outcome in outcomes)
        rate = num_done / self._options.closed_seconds
        text = f"capacity, 8 in 8: {rate:.2f} requests/s, {rate * self._options.tokens:.0f} tokens/s"
        self._report.say("capacity_per_s", rate, text)
        return rate

    def _run_closed(self, name: str, num_adapters: int) -> list[Outcome]:
        self._settle(num_adapters)
        evictions = self._server.num_evictions()
        source = ClosedLoop(self._options.closed_seconds, num_adapters, self._ask)
        outcomes = self._server.serve(source, Progress(name, source.seconds))
        self._note(name, source.seconds, outcomes, self._server.num_evictions() - evictions)
        return outcomes

    def _run_open_loops(self, rate: float) -> dict[str, float]:
        """The three open loops, alternating by slices; p95 of each in milliseconds."""
        even, zipf = [1.0] * _NUM_ADAPTERS, [1 / (rank + 1) for rank in range(_NUM_ADAPTERS)]
        phases = {"8 in 8": even[:_NUM_SLOTS], "16 in 8": even, "16 in 8, Zipf 1.0": zipf}
        outcomes: dict[str, list[Outcome]] = {name: [] for name in phases}
        evictions = dict.fromkeys(phases, 0)
        for _ in range(self._options.slices):
            for name, weights in phases.items():
                self._settle(len(weights))
                before = self._server.num_evictions()
                source = self._build_open_loop(rate, weights, looks=name == "16 in 8")
                outcomes[name] += self._server.serve(source, Progress(name, source.seconds))
                evictions[name] += self._server.num_evictions() - before
        for name, found in outcomes.items():
            self._note(name, self._options.seconds, found, evictions[name])
        return {name: percentile(ttfts_ms(found), 95) for name, found in outcomes.items()}

    def _build_open_loop(self, rate: float, weights: Sequence[float], *, looks: bool) -> OpenLoop:
        seconds = self._options.seconds / self._options.slices
        arrivals, at_s = [], self._rng.expovariate(rate)
        while at_s < seconds:
            (adapter,) = self._rng.choices(range(len(weights)), weights)
            arrivals.append(Arrival(at_s, adapter, self._ask()))
            at_s += self._rng.expovariate(rate)
        return LookingOpenLoop(arrivals, seconds, self._look) if looks else OpenLoop(arrivals, seconds)

    def _look(self) -> None:
        self._state = self._server.state()

    def _settle(self, num_adapters: int) -> None:
        """Use each adapter once, so that all are in host memory and the last ones in slots."""
        for adapter in range(num_adapters):
            arrival = Arrival(0.0, adapter, self._ask())
            (outcome,) = self._server.serve(OpenLoop([arrival], 0.0), Progress("", 1e9))
            assert outcome.error is None, outcome.error

    def _ask(self) -> list[int]:
        return random_ids(self._rng, self._options.prompt_tokens, 300 if self._options.quick else 40_000)

    def _note(self, name: str, seconds: float, outcomes: Sequence[Outcome], num_evictions: int) -> None:
        ttfts = ttfts_ms(outcomes)
        num_errors = sum(outcome.error is not None for outcome in outcomes)
        spread = (percentile(ttfts, percent) for percent in (50, 95, 99, 100))
        wait_ms = max((outcome.slot_wait_ms for outcome in outcomes), default=0.0)
        self._rows.append((name, len(outcomes), num_errors, len(outcomes) / seconds, *spread, wait_ms, num_evictions))


class LookingOpenLoop(OpenLoop):
    """An open loop that looks at the engine once, half-way."""

    def __init__(self, arrivals: Sequence[Arrival], seconds: float, look: Callable[[], None]) -> None:
        super().__init__(arrivals, seconds)
        self._look: Callable[[], None] | None = look

    def take(self, now_s: float, num_open: int) -> list[Arrival]:
        if self._look is not None and now_s > self.seconds / 2 and num_open:
            self._look()
            self._look = None
        return super().take(now_s, num_open)


def ttfts_ms(outcomes: Sequence[Outcome]) -> list[float]:
    """Of all that were answered."""
    return [outcome.ttft_ms for outcome in outcomes if outcome.first_at_s is not None and outcome.error is None]


if __name__ == "__main__":
    sys.exit(main())
