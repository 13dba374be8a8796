"""Checks and times the Triton LoRA kernels on a GPU. Run by path; a few minutes.

    python tests/bench/bench_gpu_kernels.py [--dtype bfloat16] [--quick]

First numbers against the naive form in float64, then bits of rows alone and in company, then a captured graph, then
times at the shapes of an 8B Llama: microseconds a launch, bytes a second against the speed of the memory, distinct
against identical adapters, and what one adapter of a high rank costs the others. Where there is no GPU it says so and
ends with exit code 2.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from loraplex_engine.core.request import NO_SLOT
from loraplex_engine.ops.dispatch import select_kernels
from loraplex_engine.ops.lora.segment import SegmentBuffers, build_segments
from loraplex_engine.ops.lora.table import GroupShape, LoraTable
from support_lora import MIXED, SMALL, SMOLLM2, assert_true, make_step, pick_slots, same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LLAMA_8B = {
    "qkv": GroupShape(4096, (4096, 1024, 1024)),
    "o": GroupShape(4096, (4096,)),
    "gate_up": GroupShape(4096, (14336, 14336)),
    "down": GroupShape(14336, (4096,)),
    "embedding": GroupShape(128256, (4096,)),
    "head": GroupShape(4096, (128256,)),
}
# GB/s of the memory, by a part of the device's name, the longer ones first (vendor's data sheets)
MEMORY_SPEED = {
    "A100-SXM4-80GB": 2039,
    "A100 80GB": 1935,
    "A100": 1555,
    "H100 PCIe": 2000,
    "H100": 3350,
    "H200": 4800,
    "B200": 8000,
    "L40S": 864,
    "L4": 300,
    "A10": 600,
    "RTX 4090": 1008,
}
LAYERS = 16  # that many are larger than the second-level cache, as in a model
REPLAYS = 20


def check_numbers(device: str, *, is_quick: bool) -> int:
    """Compare with the truth; returns how many steps were compared."""
    ranks = (8, MIXED) if is_quick else (1, 4, 8, 16, 17, 64, 128, 256, MIXED)
    rows = (1, 33) if is_quick else (1, 7, 33, 133, 1000)
    popularities = ("identical", "uniform", "skewed", "distinct")
    groups = ("qkv", "o", "gate_up", "down", "head")
    cases = [*itertools.product(DTYPES, ranks, popularities, rows, groups, (SMALL,))]
    cases += itertools.product(DTYPES, (16, 64), ("skewed",), (33,), ("qkv", "down"), (SMOLLM2, LLAMA_8B))
    for dtype, rank, popularity, num_rows, group, shapes in cases:
        slots = pick_slots(popularity, num_rows)
        if popularity == "distinct":
            slots = [slot % 64 for slot in slots]
        step = make_step(slots, dtype, rank, group, shapes, device)
        x, y = step.inputs()
        before, truth = y.clone(), step.truth(x, y)
        select_kernels(device, dtype).lora_add(x, y, step.table, 0, group, step.segments)
        assert_true(y, before, truth, step)
    return len(cases)


def check_bits(device: str, num_mixes: int) -> int:
    """Compare rows alone with the same rows in company; returns how many mixes were compared."""
    slots = [0, 1, 2, 3, 4, 5, NO_SLOT, 1]
    cases = [*itertools.product(DTYPES, ("qkv", "down"), (SMALL, SMOLLM2, LLAMA_8B))]
    for dtype, group, shapes in cases:
        lora_add = select_kernels(device, dtype).lora_add
        step = make_step(slots, dtype, MIXED, group, shapes, device)
        x, y = step.inputs()
        alone = y.clone()
        for row, slot in enumerate(slots):
            segments = build_segments([slot], device)
            if segments is not None:
                lora_add(x[row : row + 1].clone(), alone[row : row + 1], step.table, 0, group, segments)
        for _ in range(num_mixes):
            rows = random.choices(range(len(slots)), k=random.choice([2, 9, 40, 300]))
            mixed = y[rows]
            lora_add(x[rows], mixed, step.table, 0, group, build_segments([slots[row] for row in rows], device))
            assert same_bits(mixed, alone[rows]), f"{dtype} {group}: a row depends on its company"
    return len(cases) * num_mixes


def check_graph(device: str) -> None:
    """Replay one captured graph for steps that it was not captured with."""
    buffers = SegmentBuffers(64, 8, device)
    step = make_step([0, 1, 2, 3, 4, 5, 6, 7] * 4, torch.bfloat16, MIXED, "qkv", SMOLLM2, device)
    lora_add = select_kernels(device, torch.bfloat16).lora_add
    x, y = step.inputs()
    inputs, outputs = x.clone(), y.clone()
    segments = buffers.fill(step.slots, bucket=32)
    lora_add(inputs, outputs, step.table, 0, "qkv", segments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lora_add(inputs, outputs, step.table, 0, "qkv", segments)
    for _ in range(20):
        slots = random.choices([NO_SLOT, *range(8)], k=32)
        buffers.fill(slots, bucket=32)
        outputs.copy_(y)
        graph.replay()
        expected = y.clone()
        lora_add(inputs, expected, step.table, 0, "qkv", build_segments(slots, device))
        assert same_bits(outputs, expected), "a replayed graph differs"


class Bench:
    """Adapters on every layer of an 8B model, one slot each."""

    def __init__(self, dtype: torch.dtype, group: str, ranks: Sequence[int]) -> None:
        self.group, self.ranks, self.dtype = group, ranks, dtype
        self.shape = LLAMA_8B[group]
        self.kernels = select_kernels("cuda", dtype)
        self.table = LoraTable(len(ranks), LAYERS, LLAMA_8B, max(64, *ranks), dtype, "cuda")
        for (slot, rank), layer in itertools.product(enumerate(ranks), range(LAYERS)):
            for i_slice, width in enumerate(self.shape.out_features):
                a, b = (torch.randn(rank, n, device="cuda", dtype=dtype) for n in (self.shape.in_features, width))
                self.table.set_module(slot, layer, group, i_slice, a / 100, b, 1.0)

    def time_us(self, slots: Sequence[int]) -> tuple[float, float]:
        """Microseconds of a shrink and of an expand."""
        segments = build_segments(slots, "cuda")
        x = torch.randn(len(slots), self.shape.in_features, device="cuda", dtype=self.dtype)
        y = torch.zeros(len(slots), sum(self.shape.out_features), device="cuda", dtype=self.dtype)
        v = self.kernels.lora_shrink(x, self.table, 0, self.group, segments)
        shrink = _time_us(lambda layer: self.kernels.lora_shrink(x, self.table, layer, self.group, segments))
        expand = _time_us(lambda layer: self.kernels.lora_expand(v, y, self.table, layer, self.group, segments))
        return shrink, expand

    def num_bytes(self, slots: Sequence[int]) -> int:
        """What shrink and expand together have to read and write at least."""
        inputs, outputs = self.shape.in_features, sum(self.shape.out_features)
        ranks = sum(self.ranks[slot] for slot in set(slots))
        matrices = ranks * (inputs * len(self.shape.out_features) + outputs)
        return torch.empty(0, dtype=self.dtype).element_size() * (matrices + len(slots) * (inputs + 2 * outputs))


def _time_us(launch: Callable[[int], object]) -> float:
    """Median microseconds of a launch, within one graph over all layers."""
    launch(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            launch(layer)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / LAYERS)
    return sorted(times)[REPLAYS // 2]


def print_times(dtype: torch.dtype, speed: int | None) -> None:
    """Time all groups at several batches, distinct and identical."""
    print("\ngroup    rank  batch  adapters   shrink us  expand us    GB/s  of roof")
    for group, rank in itertools.product(("qkv", "o", "gate_up", "down"), (8, 16, 64)):
        bench = Bench(dtype, group, [rank] * 64)
        for batch in (1, 4, 16, 64):
            total = {}
            for name, slots in (("distinct", list(range(batch))), ("identical", [0] * batch)):
                shrink, expand = bench.time_us(slots)
                total[name] = shrink + expand
                rate = bench.num_bytes(slots) / total[name] / 1000
                roof = f"{rate / speed:7.0%}" if speed else "      ?"
                row = f"{group:8} {rank:4} {batch:6}  {name:9} {shrink:10.1f} {expand:10.1f} {rate:7.0f}  {roof}"
                print(row, flush=True)
            print(f"{'':22}distinct/identical: {total['identical'] / total['distinct']:.2f} of the speed")


def print_taxes(dtype: torch.dtype) -> None:
    """One adapter of a high rank among fifteen of rank 8; and a long prefill beside decodes."""
    base = None
    print("\none among fifteen of rank 8, qkv, batch 16")
    for rank in (8, 16, 64, 128, 256):
        total = sum(Bench(dtype, "qkv", [8] * 15 + [rank]).time_us(list(range(16))))
        base = base or total
        print(f"  rank {rank:4}: {total:8.1f} us, {total / base:.2f} of all rank 8", flush=True)
    bench = Bench(dtype, "qkv", [16] * 16)
    for name, slots in (
        ("16 decodes", list(range(16))),
        ("prefill of 2048", [0] * 2048),
        ("both", list(range(16)) + [0] * 2048),
    ):
        print(f"  {name:16}: {sum(bench.time_us(slots)):8.1f} us", flush=True)


def main() -> int:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="fewer checks")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA GPU here, so there is nothing to measure; tests/engine/ops/triton needs none.")
        return 2
    random.seed(0)
    torch.manual_seed(0)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {select_kernels('cuda', torch.bfloat16).name} kernels", flush=True)
    print(f"numbers agree in {check_numbers('cuda', is_quick=arguments.quick)} steps", flush=True)
    print(f"bits agree in {check_bits('cuda', 5 if arguments.quick else 50)} mixes", flush=True)
    check_graph("cuda")
    print("a captured graph serves other steps", flush=True)
    speed = next((speed for part, speed in MEMORY_SPEED.items() if part in name), None)
    dtype = getattr(torch, arguments.dtype)
    print_times(dtype, speed)
    print_taxes(dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
