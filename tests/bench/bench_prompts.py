"""Prompts, their cache, what stays behind: `python tests/bench/bench_prompts.py [--quick] [--part NAME]`, 10 minutes.

In this process, without HTTP. Four parts:

- long: one prompt of 6,000 tokens arrives among eight decoding streams; their gaps, their decode steps before it, its
  time to first token against that of such a prompt alone, in turn.
- prefix: prompts that share 0, 50 and 90 % of their tokens, with the prefix cache and without it, in turn.
- waste: KV positions that are allocated and not used, sampled after every step of a load of mixed lengths.
- leak: 10,000 short requests on the base and two adapters, some of them aborted; what is then held, and the memory.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Progress, Report, build_parser, follow, parse_options, percentile
from setting import QV, SEVEN, Recipe, open_base, random_ids
from stack import resident_bytes

from engines import EngineWorld
from loraplex_engine.core.request import Request

_NUM_STREAMS = 8
_SHARES = (0.0, 0.5, 0.9)
_ABORT_SHARE = 0.1
"""Of the steps after which a request is aborted."""
_MIN_LIMIT_MS = 60.0


def main() -> int:
    """Run the parts and say which targets are met."""
    parts = {"long": measure_long, "prefix": measure_prefix, "waste": measure_waste, "leak": measure_leak}
    parser = build_parser(__doc__)
    parser.add_argument("--part", choices=parts, help="this one alone")
    parser.add_argument("--repeats", type=int, default=5, help="long, prefix: interleaved repeats")
    parser.add_argument("--long-tokens", type=int, default=6000)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="prefix: of each prompt")
    parser.add_argument("--requests", type=int, default=10_000, help="leak")
    options = parse_options(parser)
    if options.quick:
        options.repeats, options.long_tokens, options.prompt_tokens, options.requests = 2, 300, 64, 600
    report = Report("prompts", options)
    for name in (options.part,) if options.part else parts:
        with tempfile.TemporaryDirectory() as folder:
            parts[name](report, options, Bench(options, Path(folder)))
    return report.close()


@dataclass
class Answer:
    """When a request's tokens came."""

    request: Request
    added_at: float
    first_at: float | None = None
    last_at: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        assert self.first_at is not None
        return 1000 * (self.first_at - self.added_at)


class Bench:
    """An engine and clients that ask it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.base = open_base(options.base, folder, is_tiny=options.quick)
        self.rng = random.Random(0)
        self._open: dict[str, Answer] = {}

    def start(self, name: str = "cache", **settings: object) -> EngineWorld:
        """An engine as it would serve; a second one beside it with other settings."""
        defaults = {"dtype": self.options.dtype, "cpu_threads": self.options.threads, "kv_cache_memory_bytes": 1 << 30}
        return EngineWorld(self.base, self.folder / name, **{**defaults, **settings})

    def prompt(self, world: EngineWorld, length: int) -> list[int]:
        return random_ids(self.rng, length, world.engine.facts.vocab_size)

    def add(self, world: EngineWorld, request: Request) -> Answer:
        answer = Answer(request, time.monotonic())
        world.engine.add(request)
        self._open[request.request_id] = answer
        return answer

    def step(self, world: EngineWorld) -> list[Answer]:
        """One step; returns the answers that it ended."""
        ended = []
        for event in world.engine.step():
            now = time.monotonic()
            assert event.error is None, event.error
            answer = self._open[event.request_id]
            if event.token_ids:
                if answer.first_at is None:
                    answer.first_at = now
                else:
                    answer.gaps_ms.append(1000 * (now - answer.last_at))
                answer.last_at = now
            if event.finish:
                ended.append(self._open.pop(event.request_id))
        return ended

    def abort(self, world: EngineWorld, answer: Answer) -> None:
        world.engine.abort(answer.request.request_id)
        self._open.pop(answer.request.request_id, None)

    def abort_one(self, world: EngineWorld) -> None:
        """Abort one of those that run or wait, if there is any."""
        if self._open:
            self.abort(world, self.rng.choice(list(self._open.values())))

    def serve(
        self, world: EngineWorld, requests: Iterable[Request], num_clients: int, look: Callable[[], None] = lambda: None
    ) -> Iterator[Answer]:
        """A closed loop: each client sends its next request when its last one has ended; those aborted are left out."""
        todo, is_over = iter(requests), False
        while True:
            while not is_over and len(self._open) < num_clients:
                request = next(todo, None)
                is_over = request is None
                if request is not None:
                    self.add(world, request)
            if not self._open:
                return
            yield from self.step(world)
            look()


def measure_long(report: Report, options: argparse.Namespace, bench: Bench) -> None:
    """A long prompt among streams, and alone."""
    world = bench.start(max_num_seqs=_NUM_STREAMS + 1)
    rows: list[tuple[object, ...]] = []
    alone_ms, beside_ms, decode_ms, gaps_ms = [], [], [], list[float]()
    for index in follow(range(options.repeats + 1), "long"):
        alone = _time_long(bench, world)
        streams = _start_streams(bench, world)
        before_ms = _watch(bench, world, streams, 40)
        beside, gaps = _time_long(bench, world), [gap for stream in streams for gap in stream.gaps_ms]
        for stream in streams:
            bench.abort(world, stream)
        if index == 0:
            continue
        alone_ms.append(alone)
        beside_ms.append(beside)
        decode_ms.append(statistics.median(before_ms))
        gaps_ms += gaps
        rows.append(
            (index, decode_ms[-1], *(percentile(gaps, p) for p in (50, 99, 100)), alone, beside, beside / alone)
        )
    header = ("long prompt", "decode ms", "gap p50", "p99", "max", "TTFT alone", "beside", "ratio")
    report.table(header, rows)
    limit_ms = max(3 * statistics.median(decode_ms), _MIN_LIMIT_MS)
    name = f"gap p99 of {_NUM_STREAMS} streams beside a prompt of {options.long_tokens} tokens, ms"
    report.check(name, percentile(gaps_ms, 99), at_most=limit_ms)
    ratios = [beside / alone for beside, alone in zip(beside_ms, alone_ms, strict=True)]
    report.check("TTFT of the long prompt, beside the streams over alone", statistics.median(ratios), at_most=3.0)


def _time_long(bench: Bench, world: EngineWorld) -> float:
    """Milliseconds to the first token of a long prompt that nobody has seen before."""
    answer = bench.add(world, world.request(bench.prompt(world, bench.options.long_tokens), max_tokens=1))
    while answer not in bench.step(world):
        pass
    return answer.ttft_ms


def _start_streams(bench: Bench, world: EngineWorld) -> list[Answer]:
    """Streams that decode, with more tokens to make than anybody waits for."""
    length = world.engine.facts.max_model_len - 128
    prompts = [bench.prompt(world, min(128, length // 4)) for _ in range(_NUM_STREAMS)]
    streams = [bench.add(world, world.request(prompt, max_tokens=length - len(prompt))) for prompt in prompts]
    while any(stream.first_at is None for stream in streams):
        bench.step(world)
    return streams


def _watch(bench: Bench, world: EngineWorld, streams: Sequence[Answer], num_steps: int) -> list[float]:
    """Gaps of some steps in which nothing but the streams runs; forgotten by the streams."""
    for _ in range(num_steps):
        bench.step(world)
    gaps_ms = [gap for stream in streams for gap in stream.gaps_ms[-num_steps + 4 :]]
    for stream in streams:
        stream.gaps_ms.clear()
    return gaps_ms


def measure_prefix(report: Report, options: argparse.Namespace, bench: Bench) -> None:
    """Shared prefixes, cached and computed again."""
    worlds = {True: bench.start("with"), False: bench.start("without", enable_prefix_caching=False)}
    speed: dict[tuple[float, bool], list[float]] = {(s, c): [] for s in _SHARES for c in worlds}
    ttft_ms: dict[tuple[float, bool], list[float]] = {key: [] for key in speed}
    cached: dict[tuple[float, bool], list[float]] = {key: [] for key in speed}
    num_requests, num_tokens = (8, 4) if options.quick else (48, 32)
    for _ in follow(range(options.repeats), "prefix"):
        order = list(speed)
        bench.rng.shuffle(order)
        for share, is_cached in order:
            world = worlds[is_cached]
            requests = _sharing(bench, world, share, num_requests, num_tokens)
            started_at = time.monotonic()
            answers = list(bench.serve(world, requests, 8))
            speed[share, is_cached].append(num_requests * num_tokens / (time.monotonic() - started_at))
            ttft_ms[share, is_cached] += [answer.ttft_ms for answer in answers]
            num_cached = sum(answer.request.num_cached for answer in answers)
            cached[share, is_cached].append(num_cached / (num_requests * options.prompt_tokens))
    rows = []
    for share in _SHARES:
        faster = statistics.median(a / b for a, b in zip(speed[share, True], speed[share, False], strict=True))
        for is_cached, ratio in ((True, faster), (False, 1.0)):
            key = share, is_cached
            spread = [percentile(ttft_ms[key], percent) for percent in (50, 95)]
            name = f"{share:.0%}, {'on' if is_cached else 'off'}"
            rows.append((name, statistics.median(speed[key]), *spread, statistics.median(cached[key]), ratio))
        name = f"tokens/s with the cache over without, {share:.0%} shared"
        report.check(name, faster, at_least=1.0 if share else 0.95)
    header = ("shared, cache", "tokens/s", "TTFT p50 ms", "p95", "found", "speed over off")
    report.table(header, rows)


def _sharing(bench: Bench, world: EngineWorld, share: float, num_requests: int, num_tokens: int) -> list[Request]:
    """Requests whose prompts begin alike, with a beginning of their own set."""
    length = bench.options.prompt_tokens
    prefix = bench.prompt(world, int(share * length))
    return [
        world.request(prefix + bench.prompt(world, length - len(prefix)), max_tokens=num_tokens)
        for _ in range(num_requests)
    ]


def measure_waste(report: Report, options: argparse.Namespace, bench: Bench) -> None:
    """Allocated and unused KV positions under a load of mixed lengths."""
    world = bench.start(enable_prefix_caching=True)
    num_requests, longest = (24, 200) if options.quick else (256, 2000)
    allocated, unused, peak = 0, 0, 0.0
    block_size = world.engine.facts.block_size

    def look() -> None:
        nonlocal allocated, unused, peak
        running = list(world.engine.scheduler.running)
        now = sum(len(request.block_ids) for request in running) * block_size
        free = now - sum(request.num_computed for request in running)
        allocated, unused = allocated + now, unused + free
        peak = max(peak, free / now) if now else peak

    requests = [
        world.request(bench.prompt(world, _log_uniform(bench.rng, 8, longest)), max_tokens=bench.rng.randint(8, 128))
        for _ in range(num_requests)
    ]
    for _ in bench.serve(world, _with_progress(requests, "waste"), 16, look):
        pass
    report.say(
        "waste_peak",
        peak,
        f"\nallocated and unused at worst, of one step: {peak:.1%} (the first steps of short prompts)",
    )
    report.check("KV positions allocated and unused over allocated, all steps", unused / allocated, at_most=0.04)


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(low * (high / low) ** rng.random())


def _with_progress(requests: Sequence[Request], label: str) -> Iterator[Request]:
    progress = Progress(label, len(requests))
    for index, request in enumerate(requests):
        yield request
        progress.update(index + 1)


def measure_leak(report: Report, options: argparse.Namespace, bench: Bench) -> None:
    """Many short requests; what is held and how the memory grew."""
    # a pool that is soon full of prefixes, so that it does not grow while the memory is watched
    world = bench.start(max_loras=2, kv_cache_memory_bytes=(8 if options.quick else 128) << 20)
    recipes = (Recipe(8, QV), Recipe(16, SEVEN))
    digests = [world.put(recipe.write(bench.folder / f"a{i}", bench.base, i)) for i, recipe in enumerate(recipes)]
    started = _Started(bench, world, [None, *digests], options.requests)
    started_at = time.monotonic()
    # nothing is kept of an answer, or the bench itself would grow
    num_aborted = options.requests - sum(1 for _ in bench.serve(world, started, 16, started.look))
    seconds = time.monotonic() - started_at
    report.say(
        "leak_aborted", num_aborted, f"\n{options.requests} requests in {seconds:.0f} s, {num_aborted} of them aborted"
    )
    engine = world.engine
    engine.check_integrity()
    held = {
        "blocks held": engine.pool.num_blocks - engine.pool.num_free,
        "pins held": sum(slot.num_pins for slot in engine.residency.slots.slots),
        "adapters held": len(engine.residency.held_digests),
        "requests left": len(engine.scheduler.waiting) + len(engine.scheduler.running),
    }
    for name, number in held.items():
        report.check(f"{name} after {options.requests} requests", number, at_most=0)
    first, last = (num_bytes / 2**20 for _, num_bytes in (started.samples[0], started.samples[-1]))
    warm = started.samples[0][0]
    report.say("rss_bytes", started.samples, f"memory: {first:.0f} MiB after {warm} requests, {last:.0f} at the end")
    slope = statistics.linear_regression(*zip(*started.samples, strict=True)).slope
    name = f"memory growth a thousand requests after the first {warm}, MiB"
    report.check(name, 1000 * slope / 2**20, at_most=0.5)


class _Started:
    """Short requests one after the other; some are aborted while they run, and the memory is sampled."""

    def __init__(self, bench: Bench, world: EngineWorld, digests: Sequence[str | None], num_requests: int) -> None:
        self._bench = bench
        self._world = world
        self._digests = digests
        self._num_requests = num_requests
        self._num_started = 0
        self.samples: list[tuple[int, int]] = []
        """(requests started, bytes)."""

    def __iter__(self) -> Iterator[Request]:
        rng, progress = self._bench.rng, Progress("leak", self._num_requests)
        for index in range(self._num_requests):
            prompt = self._bench.prompt(self._world, rng.randint(4, 32))
            self._num_started = index + 1
            progress.update(self._num_started)
            yield self._world.request(prompt, rng.choice(self._digests), max_tokens=rng.randint(1, 6))

    def look(self) -> None:
        """After each step."""
        if self._bench.rng.random() < _ABORT_SHARE:
            self._bench.abort_one(self._world)
        next_at = self.samples[-1][0] + self._num_requests // 50 if self.samples else self._num_requests // 5
        if self._num_started >= next_at:
            self.samples.append((self._num_started, resident_bytes(os.getpid())))


if __name__ == "__main__":
    sys.exit(main())
