"""Loads beside generation: `python tests/bench/bench_loads.py [--quick] [--part gaps|cycles|storm]`, about 10 minutes.

Real processes: a registry, a core and its loader, which fetches over HTTP, verifies and packs. Three parts:

- gaps: eight streams with adapters of their own, in turn without loads and with loads of digests that neither the core
  nor its disk has seen; the gaps between the streams' steps.
- cycles: a thousand times one load and one unload; what the core then counts, how the memory of both processes grew.
- storm: loads and unloads at 10 Hz, also of adapters in use, under eight clients; every answer against the same request
  undisturbed.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Progress, Report, build_parser, follow, parse_options, percentile
from setting import ATTENTION, CACHE_DIR, QV, SEVEN, Recipe, open_base, random_ids
from stack import Front, LiveRegistry, loader_of, num_open_files, resident_bytes, running_registry

from core_world import Core
from loraplex_engine.bases.folder import load_spec
from loraplex_engine.config import EngineConfig
from loraplex_engine.wire import messages as wire
from registry_world import ENGINE_KEY

_NUM_STREAMS = 8
_PROMPT_LEN = 128
_MAX_STREAM_LEN = 4096
_PARTS = ("gaps", "cycles", "storm")
_SORTS = (Recipe(8, QV), Recipe(16, ATTENTION), Recipe(4, SEVEN), Recipe(32, SEVEN))
_WARM_CYCLES = 200
_SAMPLE_EVERY = 50
_ANSWER_S = 120.0
_PROMPTS_PER_ADAPTER = 4
_ZERO_WHEN_UNLOADED = (
    'loraplex_adapters_resident{tier="slot"}',
    'loraplex_adapters_resident{tier="host"}',
    'loraplex_adapter_bytes{tier="slot"}',
    'loraplex_adapter_bytes{tier="host"}',
    "loraplex_adapters_failed",
    "loraplex_adapters_quarantined",
)


def main() -> int:
    """Run the parts and say which targets are met."""
    parser = build_parser(__doc__)
    parser.add_argument("--part", choices=_PARTS, help="this one alone")
    parser.add_argument("--pairs", type=int, default=6, help="gaps: stretches without and with loads")
    parser.add_argument("--seconds", type=float, default=15.0, help="gaps: of each stretch")
    parser.add_argument("--loads-per-s", type=float, default=0.5, help="gaps")
    parser.add_argument("--rank", type=int, default=16, help="gaps: of all adapters, on all seven modules")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--storm-seconds", type=float, default=60.0)
    parser.add_argument("--storm-hz", type=float, default=10.0, help="loads and unloads per second")
    parser.add_argument("--tokens", type=int, default=48, help="storm: tokens of an answer")
    options = parse_options(parser)
    if options.quick:
        options.pairs, options.seconds, options.cycles, options.storm_seconds, options.rank = 2, 1.0, 300, 3.0, 4
    if options.cycles < _WARM_CYCLES + 2 * _SAMPLE_EVERY:
        parser.error(f"--cycles must be at least {_WARM_CYCLES + 2 * _SAMPLE_EVERY}")
    report = Report("loads", options)
    for part in (options.part,) if options.part else _PARTS:
        with open_bench(options) as bench:
            {"gaps": measure_gaps, "cycles": measure_cycles, "storm": measure_storm}[part](report, options, bench)
    return report.close()


@dataclass
class Bench:
    """The processes of one part."""

    base: Path
    folder: Path
    registry: LiveRegistry
    core: Core
    front: Front
    facts: wire.CoreReady
    _seeds: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    def push(self, recipes: Sequence[Recipe]) -> list[str]:
        """Upload new adapters; returns their digests."""
        digests = []
        for recipe in follow(recipes, "uploads"):
            with tempfile.TemporaryDirectory() as folder:
                digests.append(self.registry.push(recipe.write(Path(folder) / "adapter", self.base, next(self._seeds))))
        return digests

    def prompt(self, rng: random.Random) -> list[int]:
        """A prompt of the usual length."""
        return random_ids(rng, _PROMPT_LEN, self.facts.vocab_size)

    def cached_digests(self) -> int:
        """Adapters on the core's disk."""
        return sum(1 for _ in (self.folder / "cache" / "adapters").glob("sha256/*/*/*"))


@contextmanager
def open_bench(options: argparse.Namespace) -> Iterator[Bench]:
    """Start a registry and a core that shares nothing with an earlier one."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        base = open_base(options.base, folder, is_tiny=options.quick)
        registry = stack.enter_context(running_registry(folder / "registry"))
        registry.register(load_spec(base))
        (folder / "cache").mkdir()
        # the disk cache is cold, the compiled ops need not be
        (CACHE_DIR / "native").mkdir(parents=True, exist_ok=True)
        (folder / "cache" / "native").symlink_to(CACHE_DIR / "native")
        config = EngineConfig(
            base=str(base),
            cache_dir=str(folder / "cache"),
            registry_url=registry.url,
            dtype=options.dtype,
            cpu_threads=options.threads,
            max_loras=2 * _NUM_STREAMS,
            kv_cache_memory_bytes=1 << 30,
        )
        core = Core(config, folder, ENGINE_KEY)
        stack.callback(core.close)
        facts = core.wait_ready()
        assert isinstance(facts, wire.CoreReady), facts
        yield Bench(base, folder, registry, core, Front(core), facts)


@dataclass
class Stretch:
    """Some seconds of eight streams."""

    gaps_ms: list[float]
    load_s: list[float]
    num_loads: int
    """Asked for; `load_s` holds those that were done while the streams ran."""


def measure_gaps(report: Report, options: argparse.Namespace, bench: Bench) -> None:
    """Step gaps of running streams with loads against without."""
    recipe = Recipe(options.rank, SEVEN)
    streams = bench.push([recipe] * _NUM_STREAMS)
    unseen = iter(bench.push([recipe] * (options.pairs * math.ceil(options.loads_per_s * options.seconds))))
    run_stretch(options, bench, streams, None)
    quiet: list[Stretch] = []
    loaded: list[Stretch] = []
    for index in follow(range(options.pairs), "pairs"):
        # without, with, with, without: a drift hits both alike
        for kind in (quiet, loaded) if index % 2 == 0 else (loaded, quiet):
            kind.append(run_stretch(options, bench, streams, unseen if kind is loaded else None))
    rows = []
    for name, stretches in (("without loads", quiet), (f"{options.loads_per_s:g} loads per second", loaded)):
        gaps = [gap for stretch in stretches for gap in stretch.gaps_ms]
        rows.append((name, len(gaps), *(percentile(gaps, percent) for percent in (50, 99, 100))))
    report.table((f"step gap of {_NUM_STREAMS} streams, ms", "steps", "p50", "p99", "max"), rows)
    done = [seconds for stretch in loaded for seconds in stretch.load_s]
    num_loads = sum(stretch.num_loads for stretch in loaded)
    report.say(
        "loads",
        {
            "asked": num_loads,
            "done_beside_streams": len(done),
            "p50_s": percentile(done, 50),
            "max_s": max(done or [0]),
        },
        f"{len(done)} of {num_loads} loads of never seen digests (rank {options.rank}, all seven modules) were done "
        f"beside the streams, p50 {percentile(done, 50):.2f} s, p95 {percentile(done, 95):.2f} s",
    )
    for percent, limit in ((50, None), (99, 1.2)):
        ratio = statistics.median(
            percentile(b.gaps_ms, percent) / percentile(a.gaps_ms, percent) for a, b in zip(quiet, loaded, strict=True)
        )
        report.say(
            f"gap_p{percent}_ratio", ratio, f"p{percent} step gap with loads over without, median of pairs: {ratio:.3f}"
        )
        if limit is not None:
            report.check(f"p{percent} step gap with loads over without", ratio, at_most=limit)
    # without loads that make their way the ratio would say nothing
    report.check("share of loads done beside the streams", len(done) / max(1, num_loads), at_least=0.5)


def run_stretch(
    options: argparse.Namespace, bench: Bench, digests: Sequence[str], unseen: Iterator[str] | None
) -> Stretch:
    """Let eight streams run, the same in every stretch, and load `unseen` digests at a fixed rate meanwhile."""
    front, rng = bench.front, random.Random(0)
    max_tokens = min(_MAX_STREAM_LEN, bench.facts.max_model_len) - _PROMPT_LEN
    ids = [f"s{index}-{time.monotonic_ns()}" for index in range(_NUM_STREAMS)]
    for request_id, digest in zip(ids, digests, strict=True):
        front.add(request_id, bench.prompt(rng), digest, max_tokens)
    wait_for_tokens(front, ids, 8)
    asked: dict[int, float] = {}
    gaps_ms: list[float] = []
    last_at = started_at = time.monotonic()
    is_over = False
    while not is_over and last_at - started_at < options.seconds:
        due = (last_at - started_at) * options.loads_per_s
        while unseen is not None and len(asked) < due and (digest := next(unseen, None)) is not None:
            asked[front.call(wire.LoadAdapter, digest=digest)] = time.monotonic()
        events = front.hear(1.0)
        if events:
            now = time.monotonic()
            gaps_ms.append(1e3 * (now - last_at))
            last_at = now
            is_over = any(event.finish for event in events)
    done = {call_id: front.replies[call_id][0] - at for call_id, at in asked.items() if call_id in front.replies}
    stop_streams(front, ids)
    front.wait(*asked)
    return Stretch(gaps_ms, list(done.values()), len(asked))


def wait_for_tokens(front: Front, ids: Sequence[str], num_tokens: int) -> None:
    """Wait until each stream has so many tokens."""
    counts = dict.fromkeys(ids, 0)
    deadline = time.monotonic() + _ANSWER_S
    while min(counts.values()) < num_tokens:
        assert time.monotonic() < deadline, f"streams that do not start: {counts}"
        for event in front.hear(1.0):
            assert event.error is None, event.error
            # streams of an earlier stretch may still say that they were stopped
            if event.request_id in counts:
                counts[event.request_id] += len(event.token_ids)


def stop_streams(front: Front, ids: Sequence[str]) -> None:
    """End the streams and take in what is on its way."""
    for request_id in ids:
        front.abort(request_id)
    front.ask(wire.GetState)


def measure_cycles(report: Report, options: argparse.Namespace, bench: Bench) -> None:
    """Load and unload again and again: what is left in counters and in memory."""
    digests = bench.push([_SORTS[index % len(_SORTS)] for index in range(20)])
    pids = {"core": bench.core.process.pid, "loader": loader_of(bench.core.process.pid)}
    samples: dict[str, list[tuple[int, int]]] = {name: [] for name in pids}
    open_files: dict[str, int] = {}
    for cycle in follow(range(1, options.cycles + 1), "cycles"):
        digest = digests[cycle % len(digests)]
        bench.front.ask(wire.LoadAdapter, digest=digest)
        bench.front.ask(wire.DropAdapter, digest=digest)
        if cycle % _SAMPLE_EVERY == 0:
            for name, pid in pids.items():
                samples[name].append((cycle, resident_bytes(pid)))
        if cycle == _WARM_CYCLES:
            open_files = {name: num_open_files(pid) for name, pid in pids.items()}
    rows = []
    for name, found in samples.items():
        late = [(cycle, rss) for cycle, rss in found if cycle >= _WARM_CYCLES]
        slope = slope_mib(late)
        rows.append((name, found[0][1] / 2**20, found[-1][1] / 2**20, slope))
        report.check(f"memory of the {name}, MiB per 100 cycles after {_WARM_CYCLES}", slope, at_most=1.0)
    report.table((f"memory over {options.cycles} loads and unloads", "first MiB", "last MiB", "MiB per 100"), rows)
    assert loader_of(bench.core.process.pid) == pids["loader"], "the loader died on the way"
    wrong = find_leftovers(bench, num_loads=options.cycles, num_cached=len(digests))
    wrong += [f"{name} has other descriptors" for name, pid in pids.items() if num_open_files(pid) != open_files[name]]
    report.say("leftovers", wrong, f"counters of bank, slots, host, disk and descriptors: {wrong or 'exact'}")
    report.check("counters that are wrong after the cycles", len(wrong), at_most=0.0)


def slope_mib(samples: Sequence[tuple[int, int]]) -> float:
    """Least squares of (cycle, bytes), as MiB per 100 cycles."""
    slope, _ = statistics.linear_regression(*zip(*samples, strict=True))
    return 100 * slope / 2**20


def find_leftovers(bench: Bench, *, num_loads: int | None, num_cached: int) -> list[str]:
    """What is not as it must be when every adapter was unloaded and nothing runs."""
    state, samples = bench.front.ask(wire.GetState), bench.front.samples()
    facts: dict[str, tuple[Any, Any]] = {
        "states of slots": ({slot["state"] for slot in state["slots"]}, {"empty"}),
        "pins": (sum(slot["pins"] for slot in state["slots"]), 0),
        "host memory": (state["host"], []),
        "loads under way": (state["loading"], []),
        "requests": (state["waiting"] + state["running"], 0),
        "free KV blocks": (state["kv"]["num_free"], state["kv"]["num_blocks"]),
        "adapters on disk": (bench.cached_digests(), num_cached),
        "unfinished fetches": (list((bench.folder / "cache" / "adapters").glob(".fetch-*")), []),
        **{name: (samples[name], 0) for name in _ZERO_WHEN_UNLOADED},
    }
    loads = {"ok": 0.0, "failed": 0.0}
    for name, value in samples.items():
        if name.startswith("loraplex_adapter_loads_total{"):
            loads["ok" if 'result="ok"' in name else "failed"] += value
    facts["failed loads"] = (loads["failed"], 0)
    if num_loads is not None:
        facts["loads"] = (loads["ok"], num_loads)
    return [f"{name}: {found}, not {wanted}" for name, (found, wanted) in facts.items() if found != wanted]


@dataclass
class Client:
    """One client that asks its prompts again and again."""

    digest: str
    prompts: list[list[int]]
    answers: list[list[int]]
    """What the undisturbed engine answered, by prompt."""

    num_asked: int = 0
    output: list[int] = field(default_factory=list)


def measure_storm(report: Report, options: argparse.Namespace, bench: Bench) -> None:
    """Loads and unloads at a high rate under eight clients."""
    digests = bench.push([_SORTS[index % len(_SORTS)] for index in range(2 * _NUM_STREAMS)])
    rng = random.Random(0)
    clients = [
        Client(digest, [bench.prompt(rng) for _ in range(_PROMPTS_PER_ADAPTER)], [])
        for digest in digests[:_NUM_STREAMS]
    ]
    for client in clients:
        client.answers = [answer_alone(bench.front, prompt, client.digest, options.tokens) for prompt in client.prompts]
    assert len({tuple(answer) for client in clients for answer in client.answers}) > _NUM_STREAMS, "answers are alike"
    storm = Storm(bench.front, clients, digests, options)
    storm.run()
    for digest in digests:
        bench.front.ask(wire.DropAdapter, digest=digest)
    wrong = find_leftovers(bench, num_loads=None, num_cached=len(storm.loaded))
    report.say(
        "storm",
        {"answers": storm.num_right, "wrong": storm.num_wrong, "errors": storm.errors, "calls": len(storm.calls)},
        f"\n{options.storm_seconds:g} s of {options.storm_hz:g} loads or unloads a second, {len(storm.calls)} in all, "
        f"{storm.num_overtaken} loads overtaken by a drop (409), {storm.num_failed_calls} failed: "
        f"{storm.num_right} answers right, {storm.num_wrong} wrong, "
        f"{len(storm.errors)} errors {storm.errors[:3]}; left over: {wrong or 'nothing'}",
    )
    report.check("storm: answers with other tokens than undisturbed", storm.num_wrong, at_most=0.0)
    report.check("storm: answers with an error", len(storm.errors), at_most=0.0)
    report.check(
        "storm: loads and unloads that failed",
        storm.num_failed_calls,
        at_most=0.0,
    )
    report.check("storm: counters that are wrong afterwards", len(wrong), at_most=0.0)


def answer_alone(front: Front, prompt: list[int], digest: str, num_tokens: int) -> list[int]:
    """Tokens of one request with nothing beside it."""
    front.add("alone", prompt, digest, num_tokens)
    output: list[int] = []
    deadline = time.monotonic() + _ANSWER_S
    while len(output) < num_tokens:
        assert time.monotonic() < deadline, "a request is not answered"
        for event in front.hear(1.0):
            assert event.error is None, event.error
            output += event.token_ids
    return output


class Storm:
    """Eight clients and somebody who cannot make up his mind."""

    def __init__(
        self, front: Front, clients: Sequence[Client], digests: Sequence[str], options: argparse.Namespace
    ) -> None:
        self._front = front
        self._open = {f"c{index}-0": client for index, client in enumerate(clients)}
        self._digests = digests
        self._options = options
        self.loaded = {client.digest for client in clients}
        self.calls: list[int] = []
        self.num_right = self.num_wrong = self.num_overtaken = self.num_failed_calls = 0
        self.errors: list[str] = []

    def run(self) -> None:
        """Until the time is over and everything is answered."""
        rng, options = random.Random(1), self._options
        progress = Progress("storm", options.storm_seconds)
        for request_id, client in self._open.items():
            self._ask(request_id, client)
        started_at = time.monotonic()
        passed_s = 0.0
        while self._open or any(call_id not in self._front.replies for call_id in self.calls):
            assert passed_s < options.storm_seconds + _ANSWER_S, "the storm does not end"
            if len(self.calls) < min(passed_s, options.storm_seconds) * options.storm_hz:
                kind, digest = rng.choice((wire.LoadAdapter, wire.DropAdapter)), rng.choice(self._digests)
                self.calls.append(self._front.call(kind, digest=digest))
                self.loaded |= {digest} if kind is wire.LoadAdapter else set()
            for event in self._front.hear(0.01):
                self._take(event, is_over=passed_s >= options.storm_seconds)
            passed_s = time.monotonic() - started_at
            progress.update(passed_s)
        replies = [self._front.replies[call_id][1] for call_id in self.calls]
        refusals = [reply.error.code for reply in replies if reply.error is not None]
        self.num_overtaken = refusals.count("conflict")
        self.num_failed_calls = len(refusals) - self.num_overtaken

    def _ask(self, request_id: str, client: Client) -> None:
        client.output = []
        prompt = client.prompts[client.num_asked % len(client.prompts)]
        self._front.add(request_id, prompt, client.digest, self._options.tokens)

    def _take(self, event: wire.TokenEvent, *, is_over: bool) -> None:
        client = self._open[event.request_id]
        client.output += event.token_ids
        if event.finish is None:
            return
        del self._open[event.request_id]
        if event.error is not None:
            self.errors.append(event.error.code)
        elif client.output == client.answers[client.num_asked % len(client.answers)]:
            self.num_right += 1
        else:
            self.num_wrong += 1
        client.num_asked += 1
        if not is_over:
            request_id = f"{event.request_id.split('-')[0]}-{client.num_asked}"
            self._open[request_id] = client
            self._ask(request_id, client)


if __name__ == "__main__":
    sys.exit(main())
