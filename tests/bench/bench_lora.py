"""What LoRA adds to a decode step: `python tests/bench/bench_lora.py [--quick]`, some minutes.

Milliseconds with adapters minus without, beside the roof of this machine: the larger of bytes of weights over memory
bandwidth and operations over matrix speed, both measured in the same run with the engine's threads. Then what distinct
adapters cost against identical ones, and what one adapter of rank 128 costs its neighbours. All cases run in a shuffled
order within each round; differences and ratios are taken within a round, and their medians are printed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Report, build_parser, follow, parse_options, percentile
from setting import ATTENTION, QV, QVO, SEVEN, Recipe, open_base, random_ids

from engines import EngineWorld

_BATCHES = (1, 4, 8, 16)
_ROWS = 16
MIXED = (
    Recipe(4, SEVEN),
    Recipe(4, SEVEN),
    Recipe(8, QV),
    Recipe(8, ATTENTION),
    Recipe(16, ATTENTION),
    Recipe(16, SEVEN),
    Recipe(32, SEVEN),
    Recipe(64, SEVEN),
)
_COSTS = {"8 of rank 16": None, "distinct rank 16 all seven": None, "8 of ranks 4 to 64": 4.5}
"""Case to the most milliseconds that its adapters may add to a step; None: by the roof."""

_FIXED_MS, _ROOFS = 1.5, 2.5
_PROMPT_LEN = 128


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter and how large it is."""

    digest: str
    num_parameters: int


@dataclass(frozen=True)
class Case:
    """One decode step: an adapter, or None for the base, for each row."""

    name: str
    world: EngineWorld
    rows: tuple[Adapter | None, ...]

    @property
    def num_weights(self) -> int:
        """Entries of A and B that the step has to read: each adapter's once."""
        return sum(adapter.num_parameters for adapter in {row for row in self.rows if row is not None})

    @property
    def num_operations(self) -> int:
        """Multiplications and additions of shrink and expand."""
        return sum(2 * row.num_parameters for row in self.rows if row is not None)


def main() -> int:
    """Measure, print, and say which targets are met."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="how often every case is measured")
    parser.add_argument("--steps", type=int, default=16, help="steps of a measurement, whose median counts")
    options = parse_options(parser)
    if options.quick:
        options.rounds, options.steps = 2, 4
    report = Report("lora", options)
    with tempfile.TemporaryDirectory() as folder:
        cases = build_cases(options, Path(folder))
        roof = Roof(cases["base"].world.engine.facts.dtype, is_small=options.quick)
        times: dict[str, list[float]] = {name: [] for name in cases}
        rng = random.Random(0)
        for index in follow(range(options.rounds + 1), "rounds"):
            roof.measure()
            for name in rng.sample(sorted(cases), len(cases)):
                step_ms = decode_step_ms(cases[name], options.steps)
                # the first round warms up
                times[name] += [step_ms] if index else []
        judge(report, cases, times, roof)
    return report.close()


def build_cases(options: argparse.Namespace, folder: Path) -> dict[str, Case]:
    """All cases by name, every adapter resident."""
    base = open_base(options.base, folder, is_tiny=options.quick)
    world = open_world(base, folder / "rank64", options, max_lora_rank=64, max_loras=2 * _ROWS + len(MIXED))
    large = open_world(base, folder / "rank128", options, max_lora_rank=128, max_loras=_ROWS + 2)
    seven = load(world, base, [Recipe(16, SEVEN)] * _ROWS, first_seed=0)
    qv = load(world, base, [Recipe(8, QV)] * _ROWS, first_seed=100)
    mixed = load(world, base, MIXED, first_seed=200)
    neighbours = load(large, base, [Recipe(8, QV)] * _ROWS, first_seed=100)
    big_qvo, big_seven = load(large, base, [Recipe(128, QVO), Recipe(128, SEVEN)], first_seed=300)
    cases = [
        *(case for rows in _BATCHES for case in cases_of_batch(world, rows, seven, qv)),
        Case("8 of rank 16", world, cycle(seven[:8], _ROWS)),
        Case("8 of ranks 4 to 64", world, cycle(mixed, _ROWS)),
        Case("rank 8 alone, limit 128", large, tuple(neighbours)),
        Case("one rank 128 on q, v, o", large, (big_qvo, *neighbours[1:])),
        Case("one rank 128 on all seven", large, (big_seven, *neighbours[1:])),
    ]
    return {case.name: case for case in cases}


def open_world(
    base: Path, cache: Path, options: argparse.Namespace, *, max_lora_rank: int, max_loras: int
) -> EngineWorld:
    """An engine that keeps all its adapters in slots."""
    return EngineWorld(
        base,
        cache,
        dtype=options.dtype,
        cpu_threads=options.threads,
        max_lora_rank=max_lora_rank,
        max_loras=max_loras,
        kv_cache_memory_bytes=1 << 30,
        max_num_seqs=_ROWS,
    )


def load(world: EngineWorld, base: Path, recipes: Sequence[Recipe], *, first_seed: int) -> list[Adapter]:
    """Write adapters and make each resident by a request."""
    adapters = []
    for index, recipe in enumerate(follow(recipes, "adapters")):
        with tempfile.TemporaryDirectory() as folder:
            digest = world.put(recipe.write(Path(folder) / "adapter", base, first_seed + index))
        events = world.run([world.request([100, 101], digest, 2)])
        assert all(event.error is None for found in events.values() for event in found), events
        adapters.append(Adapter(digest, recipe.num_parameters(base)))
    return adapters


def cases_of_batch(world: EngineWorld, num_rows: int, seven: Sequence[Adapter], qv: Sequence[Adapter]) -> list[Case]:
    """The base, and identical and distinct adapters of both sorts."""
    suffix = "" if num_rows == _ROWS else f", batch {num_rows}"
    cases = [Case(f"base{suffix}", world, (None,) * num_rows)]
    for name, adapters in (("rank 8 q, v", qv), ("rank 16 all seven", seven)):
        cases.append(Case(f"identical {name}{suffix}", world, cycle(adapters[:1], num_rows)))
        cases.append(Case(f"distinct {name}{suffix}", world, cycle(adapters, num_rows)))
    return cases


def cycle(adapters: Sequence[Adapter], num_rows: int) -> tuple[Adapter, ...]:
    """Give the rows the adapters in turn."""
    return tuple(adapters[row % len(adapters)] for row in range(num_rows))


def decode_step_ms(case: Case, num_steps: int) -> float:
    """Median milliseconds of a step in which every row decodes."""
    engine = case.world.engine
    rng = random.Random(0)
    prompts = [random_ids(rng, _PROMPT_LEN, engine.facts.vocab_size) for _ in case.rows]
    requests = [
        case.world.request(prompt, row.digest if row else None, num_steps + 64)
        for prompt, row in zip(prompts, case.rows, strict=True)
    ]
    for request in requests:
        engine.add(request)
    while any(not request.output_ids for request in requests):
        engine.step()
    times = []
    for _ in range(num_steps):
        started_at = time.perf_counter()
        events = engine.step()
        times.append(1e3 * (time.perf_counter() - started_at))
        assert len(events) == len(requests), "a row took no part in the step"
    for request in requests:
        engine.abort(request.request_id)
    return statistics.median(times)


class Roof:
    """The best that memory and matrix units of this machine have shown, with the engine's threads."""

    def __init__(self, dtype: str, *, is_small: bool) -> None:
        self._itemsize = getattr(torch, dtype).itemsize
        # beyond any cache
        self._array = torch.ones((1 << 22) if is_small else (1 << 27))
        self._vector = torch.ones(1 << 12)
        side = 256 if is_small else 2048
        self._factor = torch.ones(side, side, dtype=getattr(torch, dtype))
        self.bytes_per_s = 0.0
        self.operations_per_s = 0.0

    def measure(self) -> None:
        """Try again; only a better figure counts."""
        side, array = len(self._factor), self._array
        num_bytes = array.numel() * array.itemsize
        reads: list[Callable[[], object]] = [array.sum, lambda: array.view(-1, len(self._vector)) @ self._vector]
        self.bytes_per_s = max(self.bytes_per_s, *(num_bytes / fastest_s(read) for read in reads))
        multiply_s = fastest_s(lambda: self._factor @ self._factor)
        self.operations_per_s = max(self.operations_per_s, 2 * side**3 / multiply_s)

    def of(self, case: Case) -> float:
        """Milliseconds below which the LoRA part of a step cannot be."""
        read_s = case.num_weights * self._itemsize / self.bytes_per_s
        return 1e3 * max(read_s, case.num_operations / self.operations_per_s)


def fastest_s(act: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of a few runs."""
    times = []
    for _ in range(repeats):
        started_at = time.perf_counter()
        act()
        times.append(time.perf_counter() - started_at)
    return min(times)


def judge(report: Report, cases: dict[str, Case], times: dict[str, list[float]], roof: Roof) -> None:
    """Print the three tables and hold them against the targets."""
    facts = cases["base"].world.engine.facts
    report.say(
        "machine",
        {"bytes_per_s": roof.bytes_per_s, "operations_per_s": roof.operations_per_s, "dtype": facts.dtype},
        f"{facts.name}, {facts.dtype}, {facts.ops} ops, {torch.get_num_threads()} threads; "
        f"reads {roof.bytes_per_s / 1e9:.1f} GB/s, multiplies {roof.operations_per_s / 1e9:.0f} GFLOP/s; "
        f"a decode step of the base, batch {_ROWS}: {statistics.median(times['base']):.2f} ms",
    )
    judge_cost(report, cases, times, roof)
    judge_mix(report, times)
    judge_rank(report, times)


def judge_cost(report: Report, cases: dict[str, Case], times: dict[str, list[float]], roof: Roof) -> None:
    """LoRA's milliseconds beside the roof, batch 16."""
    rows = []
    for name, most_ms in _COSTS.items():
        case = cases[name]
        added = [with_ms - without_ms for with_ms, without_ms in zip(times[name], times["base"], strict=True)]
        added_ms, roof_ms = statistics.median(added), roof.of(case)
        report.check(f"LoRA ms a step, {name}", added_ms, at_most=most_ms or _FIXED_MS + _ROOFS * roof_ms)
        rows.append((name, case.num_weights / 1e6, added_ms, percentile(added, 25), percentile(added, 75), roof_ms))
    header = ("LoRA ms a step, batch 16", "M weights", "median", "p25", "p75", "roof")
    report.table(header, rows)


def judge_mix(report: Report, times: dict[str, list[float]]) -> None:
    """Tokens per second of distinct adapters over identical ones, by batch."""
    rows = []
    for batch in _BATCHES:
        suffix = "" if batch == _ROWS else f", batch {batch}"
        base_ms = statistics.median(times[f"base{suffix}"])
        for name, target in (("rank 8 q, v", 0.9), ("rank 16 all seven", 0.75)):
            identical, distinct = times[f"identical {name}{suffix}"], times[f"distinct {name}{suffix}"]
            ratio = median_ratio(identical, distinct)
            rows.append((f"{name}, batch {batch}", base_ms, *map(statistics.median, (identical, distinct)), ratio))
            if batch == _ROWS:
                report.check(f"distinct over identical tokens/s, {name}, batch {batch}", ratio, at_least=target)
    header = ("distinct adapters against identical ones", "base ms", "identical ms", "distinct ms", "tokens/s ratio")
    report.table(header, rows)


def judge_rank(report: Report, times: dict[str, list[float]]) -> None:
    """What one large adapter, or room for one, costs sixteen rows of rank 8."""
    alone = times["rank 8 alone, limit 128"]
    rows = [
        ("--max-lora-rank 128 against 64, all of rank 8", median_ratio(alone, times["distinct rank 8 q, v"])),
        ("one rank 128 on q, v, o", median_ratio(times["one rank 128 on q, v, o"], alone)),
        ("one rank 128 on all seven", median_ratio(times["one rank 128 on all seven"], alone)),
    ]
    report.check("slowdown of rank 8 by one rank 128 on q, v, o", rows[1][1], at_most=1.1)
    report.check("slowdown of rank 8 by one rank 128 on all seven", rows[2][1], at_most=1.2)
    header = ("step of 16 rows of rank 8 on q, v", "times as long")
    report.table(header, rows)


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


if __name__ == "__main__":
    sys.exit(main())
