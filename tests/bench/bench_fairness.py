"""One tenant that floods an engine: `python tests/bench/bench_fairness.py [--quick] [--http]`, about 20 minutes.

Eight tenants of equal weight, each with an adapter of its own in a slot. Seven are light: two clients each that ask
again as soon as they are answered. The eighth is light too, or has ten times the load: twenty clients. Both are
measured in turn, five pairs; what counts is the median of the pairs' ratios of the light tenants' 95th percentile of
the time to the first token, and Jain's index over the tokens that each tenant had for its weight. Then four tenants of
weights 1, 1, 2 and 4 flood together, with short and long requests, and at last the flood stays for ten minutes: the
longest time without a token for a tenant that waits. The engine runs in this process, in one thread, without HTTP;
`--http` asks a whole platform (`loraplex up`) instead, each tenant with its own key.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Progress, Report, build_parser, follow, parse_options, percentile
from setting import SEVEN, Recipe, open_base, random_ids

from engines import EngineWorld
from fair_world import jain
from loraplex.client.upload import list_files
from loraplex_engine.core.request import Request
from loraplex_engine.scheduling.fair import AGE_S
from platforms import LivePlatform, running_platform

_NUM_TENANTS = 8
_LIGHT_CLIENTS, _HEAVY_CLIENTS = 2, 20
_WEIGHTS = (1, 1, 2, 4)
_PATIENCE_S = 0.001
_MAX_WAIT_S = 300
_TURNAROUND_S = (0.0, 0.01)
"""From the end of an answer to a client's next request."""


@dataclass(frozen=True)
class Crowd:
    """Clients of one tenant, and the tokens, from and to, of what they ask and get."""

    tenant: int
    num_clients: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    weight: int = 1


@dataclass
class Tally:
    """What one tenant had in a phase."""

    ttfts_s: list[float] = field(default_factory=list)
    tokens: int = 0
    num_answers: int = 0
    num_errors: int = 0
    num_turned_away: int = 0
    """Of a flood: told `queue_full`, at once or after the time that a request may wait for a turn."""
    fed_at: float | None = None
    """Last token, or since when it waits for one."""
    starved_s: float = 0.0

    def feed(self, now: float) -> None:
        """A token has come."""
        if self.fed_at is not None:
            self.starved_s = max(self.starved_s, now - self.fed_at)
        self.fed_at = now


@dataclass
class Question:
    """One request on its way; instants are monotonic seconds."""

    crowd: Crowd
    prompt: list[int]
    num_tokens: int
    sent_at: float
    has_begun: bool = False


class Phase:
    """Crowds that ask for some seconds; counts what comes after the first `warm_s`."""

    def __init__(self, name: str, crowds: Sequence[Crowd], seconds: float, warm_s: float, rng: random.Random) -> None:
        self.name = name
        self.seconds = seconds
        self.crowds = crowds
        self.tallies = {crowd.tenant: Tally() for crowd in crowds}
        self._rng = rng
        self._began_at = time.monotonic()
        self._warm_at = self._began_at + warm_s
        self._progress = Progress(name, seconds)

    @property
    def is_over(self) -> bool:
        """Whether nobody asks any more; shows how far it is."""
        now_s = time.monotonic() - self._began_at
        self._progress.update(now_s)
        return now_s >= self.seconds

    def ask(self, crowd: Crowd) -> Question:
        """The next question of one of a crowd's clients."""
        rng, now = self._rng, time.monotonic()
        tally = self.tallies[crowd.tenant]
        tally.fed_at = tally.fed_at or now
        return Question(crowd, random_ids(rng, rng.randint(*crowd.prompt), 300), rng.randint(*crowd.output), now)

    def pause_s(self) -> float:
        """Until a client asks again."""
        return self._rng.uniform(*_TURNAROUND_S)

    def note_token(self, question: Question, num_tokens: int) -> None:
        """Tokens of an answer have come."""
        now = time.monotonic()
        tally = self.tallies[question.crowd.tenant]
        tally.feed(now)
        is_first, question.has_begun = not question.has_begun, True
        if now < self._warm_at:
            return
        tally.tokens += num_tokens + (len(question.prompt) if is_first else 0)
        if is_first and question.sent_at >= self._warm_at:
            tally.ttfts_s.append(now - question.sent_at)

    def note_end(self, question: Question, error: str | None) -> None:
        """An answer has ended, which cannot be anything but whole or an error."""
        tally = self.tallies[question.crowd.tenant]
        tally.num_answers += 1
        is_turned_away = question.crowd.num_clients == _HEAVY_CLIENTS and "queue_full" in (error or "")
        tally.num_turned_away += is_turned_away
        tally.num_errors += error is not None and not is_turned_away

    def ttft_p95_ms(self, tenants: Sequence[int]) -> float:
        """95th percentile over all first tokens of these tenants."""
        return 1e3 * percentile([ttft for tenant in tenants for ttft in self.tallies[tenant].ttfts_s], 95)

    def index(self) -> float:
        """Jain's index over the tokens of each tenant for its weight."""
        return jain([self.tallies[crowd.tenant].tokens / crowd.weight for crowd in self.crowds])


class Server(Protocol):
    """What is measured."""

    name: str

    def serve(self, phase: Phase) -> None:
        """Let the phase's clients ask until it is over; what runs then is given up."""

    def set_weights(self, weights: Sequence[int]) -> None:
        """Give the first tenants their weights."""

    def num_yields(self) -> int:
        """Requests that gave their place to others so far."""


class EngineServer:
    """The engine in this process, driven as its own loop drives it."""

    def __init__(self, world: EngineWorld, digests: Sequence[str]) -> None:
        self._engine = world.engine
        self._world = world
        self._digests = digests
        self.name = f"the engine alone, {world.engine.facts.dtype}, {world.engine.facts.ops} ops"

    def serve(self, phase: Phase) -> None:
        due = [(time.monotonic(), crowd) for crowd in phase.crowds for _ in range(crowd.num_clients)]
        running: dict[str, Question] = {}
        while not phase.is_over:
            now = time.monotonic()
            for _, crowd in [pair for pair in due if pair[0] <= now]:
                question = phase.ask(crowd)
                request = self._build(question)
                running[request.request_id] = question
                self._engine.add(request)
            due = [pair for pair in due if pair[0] > now]
            for event in self._engine.step():
                question = running[event.request_id]
                if event.token_ids:
                    phase.note_token(question, len(event.token_ids))
                if event.finish:
                    phase.note_end(question, event.error.code if event.error else None)
                    due.append((time.monotonic() + phase.pause_s(), running.pop(event.request_id).crowd))
            if not self._engine.has_running:
                time.sleep(_PATIENCE_S)
        for request_id in running:
            self._engine.abort(request_id)
        self._engine.check_integrity()

    def set_weights(self, weights: Sequence[int]) -> None:
        """Requests carry them."""

    def num_yields(self) -> int:
        return self._engine.scheduler.num_yields

    def _build(self, question: Question) -> Request:
        crowd = question.crowd
        request = self._world.request(question.prompt, self._digests[crowd.tenant], question.num_tokens)
        request.tenant_id, request.weight = f"t{crowd.tenant}", crowd.weight
        return request


class PlatformServer:
    """A whole platform, asked over HTTP by streaming clients with their teams' keys."""

    def __init__(self, platform: LivePlatform, keys: Sequence[str]) -> None:
        self._platform = platform
        self._keys = keys
        self.name = "a platform over HTTP"

    def serve(self, phase: Phase) -> None:
        asyncio.run(self._serve(phase))
        self._platform.wait_idle(30.0)

    async def _serve(self, phase: Phase) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._platform.url, timeout=300, limits=limits, trust_env=False) as http:
            clients = [
                asyncio.create_task(self._ask_on(http, phase, crowd))
                for crowd in phase.crowds
                for _ in range(crowd.num_clients)
            ]
            while not phase.is_over:
                await asyncio.sleep(0.05)
                for client in clients:
                    if client.done():
                        client.result()
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _ask_on(self, http: httpx.AsyncClient, phase: Phase, crowd: Crowd) -> None:
        while True:
            await self._ask(http, phase, phase.ask(crowd))
            await asyncio.sleep(phase.pause_s())

    async def _ask(self, http: httpx.AsyncClient, phase: Phase, question: Question) -> None:
        headers = {"authorization": f"Bearer {self._keys[question.crowd.tenant]}"}
        body = {
            "model": f"t{question.crowd.tenant}",
            "prompt": question.prompt,
            "max_tokens": question.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        num_told, error = 0, None
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                error = f"{response.status_code} {(await response.aread())[:200]!r}"
            async for line in response.aiter_lines():
                if '"error"' in line:
                    error = line[:200]
                elif line.startswith("data: {"):
                    # one event may hold several tokens, and text that is not whole yet comes later
                    num_told += 1
                    phase.note_token(question, 1)
        if error is None and num_told < question.num_tokens:
            phase.tallies[question.crowd.tenant].tokens += question.num_tokens - num_told
        if error is not None:
            print(f"error: {error}", file=sys.stderr)
        phase.note_end(question, error)

    def set_weights(self, weights: Sequence[int]) -> None:
        with self._platform.management() as client:
            for tenant, weight in enumerate(weights):
                client.update_tenant(f"t{tenant}", {"weight": weight})

    def num_yields(self) -> int:
        return int(self._platform.engine_metrics()["loraplex_fair_yields_total"])


def main() -> int:
    """Measure, print, and say whether a flood is felt."""
    parser = build_parser(__doc__)
    parser.add_argument("--http", action="store_true", help="measure a whole platform over HTTP")
    parser.add_argument(
        "--pairs", type=int, default=5, help="of a phase without and one with the flood; 0 leaves them out"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of each phase")
    parser.add_argument("--warm-seconds", type=float, default=5.0, help="at the beginning of each that do not count")
    parser.add_argument("--long-seconds", type=float, default=600.0, help="of the flood that stays; 0 leaves it out")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of a request, half as many more or less")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, half as many more or less")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters, on all seven modules")
    options = parse_options(parser)
    if options.quick:
        options.pairs, options.seconds, options.warm_seconds = 1, 3.0, 1.0
        options.prompt_tokens, options.tokens = 32, 8
        options.long_seconds = min(options.long_seconds, 4.0)
    report = Report("fairness", options)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        base = open_base(options.base, Path(folder), is_tiny=options.quick)
        build = build_platform if options.http else build_engine
        Bench(report, options, build(options, base, Path(folder), stack)).run()
    return report.close()


def build_engine(options: argparse.Namespace, base: Path, folder: Path, stack: ExitStack) -> EngineServer:
    """The engine as it comes, with the adapters it can load."""
    world = EngineWorld(
        base,
        folder / "cache",
        dtype=options.dtype,
        cpu_threads=options.threads,
        max_loras=_NUM_TENANTS,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 30,
    )
    return EngineServer(world, [world.put(source) for source in write_adapters(options, base, folder)])


def build_platform(options: argparse.Namespace, base: Path, folder: Path, stack: ExitStack) -> PlatformServer:
    """A platform with a slot for each tenant's adapter."""
    flags = ["--base", str(base), "--max-loras", str(_NUM_TENANTS), "--dtype", options.dtype]
    flags += ["--cpu-threads", str(options.threads)] if options.threads else []
    platform = stack.enter_context(running_platform(folder / "data", *flags))
    keys = []
    with platform.management() as client:
        for index, source in enumerate(write_adapters(options, base, folder)):
            client.create_tenant(f"t{index}")
            version = client.push(f"t{index}", "default", list_files(source), lambda _: None, wait=_MAX_WAIT_S)
            assert version.state == "ready", version
            keys.append(client.create_key(f"t{index}", "bench").key)
    return PlatformServer(platform, keys)


def write_adapters(options: argparse.Namespace, base: Path, folder: Path) -> list[Path]:
    """One for each tenant, on all seven modules."""
    recipe = Recipe(options.rank, SEVEN)
    return [
        recipe.write(folder / "adapters" / f"a{seed}", base, seed) for seed in follow(range(_NUM_TENANTS), "adapters")
    ]


class Bench:
    """The phases, in turn, on one server."""

    def __init__(self, report: Report, options: argparse.Namespace, server: Server) -> None:
        self._report = report
        self._options = options
        self._server = server
        self._rng = random.Random(0)
        self._rows: list[tuple[object, ...]] = []
        self._prompt = (options.prompt_tokens // 2, options.prompt_tokens * 3 // 2)
        self._output = (max(1, options.tokens // 2), options.tokens * 3 // 2)

    def run(self) -> None:
        """Measure all phases and report."""
        options = self._options
        text = f"{self._server.name}; rank {options.rank} on all seven modules, {_NUM_TENANTS} slots"
        self._report.say("server", self._server.name, text)
        pairs = [self._measure_pair(number + 1) for number in range(options.pairs)]
        floods = [flood for _, flood in pairs]
        if pairs:
            weighted = self._run("weights 1, 1, 2, 4, all flood", self._build_weighted(), options.seconds)
            self._report.check("Jain's index with weights", weighted.index(), at_least=0.95)
        if options.long_seconds:
            floods.append(self._run("flood that stays", self._build_crowds(_HEAVY_CLIENTS), options.long_seconds))
        header = (
            "phase",
            "light TTFT p50, ms",
            "p95",
            "max",
            "light tokens/s",
            "eighth tokens/s",
            "Jain",
            "longest wait, s",
            "yields",
            "turned away",
            "errors",
        )
        self._report.table(header, self._rows)
        if pairs:
            light = range(_NUM_TENANTS - 1)
            ratios = [flood.ttft_p95_ms(light) / calm.ttft_p95_ms(light) for calm, flood in pairs]
            text = f"\nratios of the pairs: {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
            self._report.say("ratios", ratios, text)
            ratio = statistics.median(ratios)
            self._report.check("light tenants' TTFT p95 with the flood over without", ratio, at_most=1.5)
        index = statistics.median([flood.index() for flood in floods])
        self._report.check("Jain's index with the flood", index, at_least=0.95)
        starved_s = max(tally.starved_s for flood in floods for tally in flood.tallies.values())
        # its turn comes after that time, and a seat is free when somebody's answer has ended
        text = "longest time without a token for a tenant that waits, s"
        self._report.check(text, starved_s, at_most=2 * AGE_S)
        self._report.check("requests that failed", sum(int(str(row[-1])) for row in self._rows), at_most=0.0)

    def _measure_pair(self, number: int) -> tuple[Phase, Phase]:
        """Without and with the flood; every other pair the other way round."""
        found: dict[int, Phase] = {}
        order = [_LIGHT_CLIENTS, _HEAVY_CLIENTS]
        for num_clients in order if number % 2 else order[::-1]:
            name = f"{number}: {'eight light' if num_clients == _LIGHT_CLIENTS else 'seven light, a flood'}"
            found[num_clients] = self._run(name, self._build_crowds(num_clients), self._options.seconds)
        return found[_LIGHT_CLIENTS], found[_HEAVY_CLIENTS]

    def _build_crowds(self, num_last: int) -> list[Crowd]:
        sizes = [_LIGHT_CLIENTS] * (_NUM_TENANTS - 1) + [num_last]
        return [Crowd(tenant, size, self._prompt, self._output) for tenant, size in enumerate(sizes)]

    def _build_weighted(self) -> list[Crowd]:
        long_prompt = tuple(4 * number for number in self._prompt)
        shapes = [
            (self._prompt, self._output),
            (long_prompt, (1, 8)),
            (self._prompt, self._output),
            ((8, 16), self._output),
        ]
        return [
            Crowd(tenant, _HEAVY_CLIENTS, (prompt[0], prompt[1]), output, weight)
            for tenant, (weight, (prompt, output)) in enumerate(zip(_WEIGHTS, shapes, strict=True))
        ]

    def _run(self, name: str, crowds: Sequence[Crowd], seconds: float) -> Phase:
        self._server.set_weights([crowd.weight for crowd in crowds])
        before = self._server.num_yields()
        phase = Phase(name, crowds, seconds, self._options.warm_seconds, self._rng)
        self._server.serve(phase)
        self._note(phase, self._server.num_yields() - before)
        return phase

    def _note(self, phase: Phase, num_yields: int) -> None:
        tallies = phase.tallies
        *light, last = tallies
        ttfts_ms = [1e3 * ttft for tenant in light for ttft in tallies[tenant].ttfts_s]
        seconds = phase.seconds - self._options.warm_seconds
        rate = sum(tallies[tenant].tokens for tenant in light) / len(light) / seconds
        spread = [percentile(ttfts_ms, percent) for percent in (50, 95, 100)]
        starved_s = max(tally.starved_s for tally in tallies.values())
        ends = [
            sum(tally.num_turned_away for tally in tallies.values()),
            sum(tally.num_errors for tally in tallies.values()),
        ]
        others = (rate, tallies[last].tokens / seconds, phase.index(), starved_s, num_yields)
        self._rows.append((phase.name, *spread, *others, *ends))


if __name__ == "__main__":
    sys.exit(main())
