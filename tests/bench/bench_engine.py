"""What mixing adapters costs and gains, on SmolLM2: `python tests/bench/bench_engine.py [--dtype float32]`.

Prints three figures, each the median of interleaved pairs: a decode step of 16 rows over eight adapters (ranks 4 to 64)
against the same step on the base alone; 16 requests at once against one by one; the base linears of a step by mix.
Run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines import ATTENTION, QV, SEVEN, EngineWorld
from loraplex_engine.bases.pull import pull
from loraplex_engine.core.request import Request
from loraplex_engine.core.step import StepPlan, StepResult
from support import write_adapter

_ADAPTERS = [(8, QV), (16, ATTENTION), (4, SEVEN), (8, ATTENTION), (32, SEVEN), (64, SEVEN), (8, SEVEN), (64, QV)]
_NUM_ROWS = 16
_CACHE_DIR = Path(os.environ.get("LORAPLEX_CACHE_DIR") or Path.home() / ".cache" / "loraplex")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--pairs", type=int, default=7, help="interleaved pairs of steps")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each of the 16 requests")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        world = EngineWorld(
            pull("smollm2-135m", _CACHE_DIR),
            Path(folder),
            dtype=args.dtype,
            kv_cache_memory_bytes=1 << 30,
            cpu_threads=0,
        )
        digests = _put_adapters(world, Path(folder))
        print(f"SmolLM2-135M, {world.engine.facts.dtype}, {torch.get_num_threads()} threads; adapters of ranks 4 to 64")
        _bench_step(world, digests, args.pairs)
        _bench_host(world, digests)
        _bench_batching(world, digests, args.tokens)
        _count_linears(world, digests)


def _put_adapters(world: EngineWorld, folder: Path) -> list[str]:
    base = pull("smollm2-135m", _CACHE_DIR)
    return [
        world.put(write_adapter(folder / f"a{seed}", base, rank=rank, targets=targets, seed=seed, std=0.02))
        for seed, (rank, targets) in enumerate(_ADAPTERS)
    ]


def _prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(100, 40_000) for _ in range(128)] for _ in range(_NUM_ROWS)]


def _bench_step(world: EngineWorld, digests: list[str], num_pairs: int) -> None:
    mixed = [digests[index % len(digests)] for index in range(_NUM_ROWS)]
    base: list[str | None] = [None] * _NUM_ROWS
    pairs = [(_decode_step_s(world, base), _decode_step_s(world, mixed)) for _ in range(num_pairs)]
    base_ms, mixed_ms = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(with_s / without_s for without_s, with_s in pairs)
    print(
        f"decode step of {_NUM_ROWS} rows: base {base_ms:.1f} ms, eight adapters {mixed_ms:.1f} ms, ratio {ratio:.2f}"
    )


def _decode_step_s(world: EngineWorld, digests: list[str] | list[str | None], num_steps: int = 24) -> float:
    """Median seconds of a step in which every row decodes."""
    requests = [world.request(ids, d, num_steps + 2) for ids, d in zip(_prompts(), digests, strict=True)]
    for request in requests:
        world.engine.add(request)
    while any(not request.output_ids for request in requests):
        world.engine.step()
    times = []
    for _ in range(num_steps // 2):
        started_at = time.perf_counter()
        world.engine.step()
        times.append(time.perf_counter() - started_at)
    for request in requests:
        world.engine.abort(request.request_id)
    return statistics.median(times)


def _bench_host(world: EngineWorld, digests: list[str], num_steps: int = 200) -> None:
    """Microseconds of decode steps outside the model, and those of the prefix index among them."""
    model_s, index_s = [0.0], [0.0]
    runner, prefixes = world.engine._runner, world.engine.scheduler.prefixes
    execute, publish = runner.execute, prefixes.publish

    def timed_execute(plan: StepPlan) -> StepResult:
        result = execute(plan)
        model_s[0] = result.model_s
        return result

    def timed_publish(request: Request) -> None:
        started_at = time.perf_counter()
        publish(request)
        index_s[0] += time.perf_counter() - started_at

    requests = [world.request(ids, digests[i % 8], num_steps + 4) for i, ids in enumerate(_prompts())]
    for request in requests:
        world.engine.add(request)
    while any(not request.output_ids for request in requests):
        world.engine.step()
    host, index = [], []
    patches = patch.object(runner, "execute", timed_execute), patch.object(prefixes, "publish", timed_publish)
    # as in the core's loop
    with world.engine.inference(), patches[0], patches[1]:
        for _ in range(num_steps):
            index_s[0], started_at = 0.0, time.perf_counter()
            world.engine.step()
            host.append(1e6 * (time.perf_counter() - started_at - model_s[0]))
            index.append(1e6 * index_s[0])
    for request in requests:
        world.engine.abort(request.request_id)
    print(
        f"host, {_NUM_ROWS} rows: p50 {statistics.median(host):.0f} us a step outside the model, of them "
        f"{statistics.median(index):.0f} us for the prefix index (mean {statistics.mean(index):.0f})"
    )


def _bench_batching(world: EngineWorld, digests: list[str], num_tokens: int) -> None:
    def requests() -> list[object]:
        return [world.request(ids, digests[i % len(digests)], num_tokens) for i, ids in enumerate(_fresh_prompts())]

    world.run(requests())  # type: ignore[arg-type]
    together, apart = [], []
    for _ in range(3):
        started_at = time.perf_counter()
        world.run(requests())  # type: ignore[arg-type]
        together.append(time.perf_counter() - started_at)
        started_at = time.perf_counter()
        for request in requests():
            world.run([request])  # type: ignore[list-item]
        apart.append(time.perf_counter() - started_at)
    once, single = statistics.median(together), statistics.median(apart)
    total = _NUM_ROWS * num_tokens
    print(
        f"{_NUM_ROWS} requests over eight adapters, 32 in, {num_tokens} out: at once {total / once:.0f} tok/s, "
        f"one by one {total / single:.0f} tok/s, {single / once:.1f}x"
    )


def _fresh_prompts() -> list[list[int]]:
    rng = random.Random(time.perf_counter_ns())
    return [[rng.randrange(100, 40_000) for _ in range(32)] for _ in range(_NUM_ROWS)]


def _count_linears(world: EngineWorld, digests: list[str]) -> None:
    """Calls of the linear operator in one decode step, as torch's profiler sees them."""
    for name, mix in (
        ("base only", [None] * 8),
        ("one adapter", [digests[0]] * 8),
        ("eight adapters", digests),
        ("base and seven adapters", [None, *digests[1:]]),
    ):
        requests = [world.request(ids, d, 8) for ids, d in zip(_fresh_prompts(), mix, strict=False)]
        for request in requests:
            world.engine.add(request)
        while any(not request.output_ids for request in requests):
            world.engine.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            world.engine.step()
        names = ("loraplex::packed_linear", "mkldnn::_linear_pointwise", "aten::linear")
        calls = {event.key: event.count for event in profile.key_averages() if event.key in names}
        print(f"linear calls of one step, {name}: {calls}")
        for request in requests:
            world.engine.abort(request.request_id)


if __name__ == "__main__":
    main()
