"""Checks and times the Triton kernels of LoRA and attention on a GPU. Run by path; a few minutes.

    python tests/bench/bench_gpu_kernels.py [--dtype bfloat16] [--quick]

First numbers against the naive form in float64, then bits of rows alone and in company, then a captured graph, then
times at the shapes of an 8B Llama: microseconds a launch, bytes a second against the speed of the memory, distinct
against identical adapters, what one adapter of a high rank costs the others, and attention by context beside torch's
own. Where there is no GPU it says so and ends with exit code 2.
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
from loraplex_engine.ops import naive
from loraplex_engine.ops.dispatch import select_kernels
from loraplex_engine.ops.lora.segment import SegmentBuffers, build_segments
from loraplex_engine.ops.lora.table import GroupShape, LoraTable
from support_attention import make_history, page
from support_lora import MIXED, SMALL, SMOLLM2, TOLERANCE, assert_true, make_step, pick_slots, same_bits

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


def check_attention(device: str, *, is_quick: bool) -> int:
    """Compare attention with the truth, and rows alone with the same rows in company; returns how many steps."""
    dims, windows = ((64, 128), (None,)) if is_quick else ((16, 64, 80, 96, 128, 256), (None, 1, 100))
    cases = [*itertools.product(DTYPES, (1, 3, 8), dims, windows)]
    for dtype, group, dim, window in cases:
        attend = select_kernels(device, dtype).paged_attention
        pasts = [make_history(n, 2 * group, 2, dim, dtype, device) for n in (1, 17, 130, 200)]
        alone = {}
        for _ in range(4):
            spans = []
            for i in random.choices(range(len(pasts)), k=random.randint(1, 5)):
                end = random.randint(1, len(pasts[i].q))
                spans.append((i, random.choice([end - 1, random.randint(0, end - 1), 0]), end))
            batch = page([(pasts[i], begin, end) for i, begin, end in spans], random.choice([4, 16]))
            out = attend(*batch.arguments(), dim**-0.5, window)
            truth = naive.paged_attention(*batch.double(), dim**-0.5, window)
            error = (out.double().cpu() - truth).abs().max() / truth.abs().max()
            assert error.item() <= 2 * TOLERANCE[dtype], f"{dtype}, {group} heads of {dim}: {error.item():.1e}"
            rows = [(i, position) for i, begin, end in spans for position in range(begin, end)]
            for i, position in set(rows) - set(alone):
                one = page([(pasts[i], position, position + 1)])
                alone[i, position] = attend(*one.arguments(), dim**-0.5, window)
            assert same_bits(out, torch.cat([alone[row] for row in rows])), f"{dtype}: a row depends on its company"
    return 4 * len(cases)


def check_attention_graph(device: str) -> None:
    """Replay one captured graph for other contexts, rows and requests than it was captured with."""
    attend = select_kernels(device, torch.bfloat16).paged_attention
    pasts = [make_history(n, 8, 2, 64, torch.bfloat16, device) for n in (200, 90, 64, 17)]
    batch = page([(past, 0, len(past.q)) for past in pasts])
    q, lists = batch.q.clone(), [t.clone() for t in (batch.block_tables, batch.query_start, batch.context_len)]
    arguments = (q, batch.k_cache, batch.v_cache, *lists, 0.125, None)
    attend(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*arguments)
    for _ in range(20):
        begins = [random.randrange(len(past.q)) for past in pasts]
        # some without a row
        spans = [(begin, random.randint(begin, len(past.q))) for begin, past in zip(begins, pasts, strict=True)]
        starts = [0, *itertools.accumulate(end - begin for begin, end in spans)]
        lists[1].copy_(torch.tensor(starts))
        lists[2].copy_(torch.tensor([end for _, end in spans]))
        rows = torch.cat([past.q[begin:end] for past, (begin, end) in zip(pasts, spans, strict=True)])
        q[: len(rows)] = rows
        graph.replay()
        expected = attend(rows, batch.k_cache, batch.v_cache, *lists, 0.125, None)
        assert same_bits(out[: len(rows)], expected), "a replayed graph differs"


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
    return _time_uncaptured_us(graph.replay) / LAYERS


def _time_uncaptured_us(launch: Callable[[], object]) -> float:
    """Median microseconds of what reads lists back and so cannot be captured."""
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
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


def print_attention_times(dtype: torch.dtype, speed: int | None) -> None:
    """Attention of an 8B Llama, 32 heads of 128 in 8 groups: the Triton form beside torch's over gathered keys."""
    kernels, torch_kernels = select_kernels("cuda", dtype), select_kernels("meta", dtype)
    print("\nattention               Triton us    torch us    GB/s  of roof   TFLOP/s")
    decodes = [(1, context) for context in (128, 1024, 8192)]
    for name, spans in (
        *((f"1 decode at {context}", [(rows, context)]) for rows, context in decodes),
        *((f"64 decodes at {context}", [(rows, context)] * 64) for rows, context in decodes),
        ("prefill of 2048", [(2048, 2048)]),
        ("chunk of 256 at 8192", [(256, 8192)]),
        ("both of 64 and chunk", [(1, 1024)] * 64 + [(256, 8192)]),
    ):
        past = make_history(8192, 32, 8, 128, dtype, "cuda")
        given = *page([(past, context - rows, context) for rows, context in spans]).arguments(), 128**-0.5, None
        ours = _time_us(lambda _, given=given: kernels.paged_attention(*given))
        torchs = _time_uncaptured_us(lambda given=given: torch_kernels.paged_attention(*given))
        positions = sum(context for _, context in spans)
        rate = past.k[0].nbytes * 2 * positions / ours / 1000
        pairs = sum(rows * (2 * context - rows + 1) / 2 for rows, context in spans)
        roof = f"{rate / speed:7.0%}" if speed else "      ?"
        print(
            f"{name:22} {ours:10.1f}  {torchs:10.1f} {rate:7.0f}  {roof} {4 * 32 * 128 * pairs / ours / 1e6:9.1f}",
            flush=True,
        )


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
    num_steps = check_attention("cuda", is_quick=arguments.quick)
    print(f"attention: numbers and bits agree in {num_steps} steps", flush=True)
    check_attention_graph("cuda")
    print("captured graphs serve other steps", flush=True)
    speed = next((speed for part, speed in MEMORY_SPEED.items() if part in name), None)
    dtype = getattr(torch, arguments.dtype)
    print_times(dtype, speed)
    print_taxes(dtype)
    print_attention_times(dtype, speed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
