"""Times the ops at the shapes of one decode step, and one prefill, of a small real base (SmolLM2-135M). Run by path.

    python tests/bench/bench_ops.py [--dtype bfloat16] [--threads 2] [--repeats 15]

All parts are timed in turn within each repeat and the medians are printed, so that a noisy moment hits all parts alike.
Two threads mean something only while nothing else runs on the machine; one thread is timed by its own CPU clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from loraplex_engine.core.module_group import LAYER_GROUPS
from loraplex_engine.ops import activation, attention, norm, rotary
from loraplex_engine.ops.linear import PackedLinear
from loraplex_engine.ops.lora.lora import lora_add
from loraplex_engine.ops.lora.segment import Segments, build_segments
from loraplex_engine.ops.lora.table import GroupShape, LoraTable
from loraplex_engine.ops.native.build import native_status

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
QKV = (HEADS + 2 * KV_HEADS) * DIM
SHAPES = {
    "qkv": GroupShape(HIDDEN, (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)),
    "o": GroupShape(HEADS * DIM, (HIDDEN,)),
    "gate_up": GroupShape(HIDDEN, (INTERMEDIATE, INTERMEDIATE)),
    "down": GroupShape(INTERMEDIATE, (HIDDEN,)),
}
ENDS = {"embedding": GroupShape(VOCAB, (HIDDEN,)), "head": GroupShape(HIDDEN, (VOCAB,))}
"""Groups that none of the adapters here targets."""

RANKS = (4, 8, 8, 8, 8, 16, 16, 64)
BLOCK = 16


class Base:
    """Random weights of the base and of eight adapters on all seven modules."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.linears = [
            {g: PackedLinear(torch.randn(sum(s.out_features), s.in_features).to(dtype) / 30) for g, s in SHAPES.items()}
            for _ in range(LAYERS)
        ]
        self.head = PackedLinear(torch.randn(VOCAB, HIDDEN).to(dtype) / 30)
        self.gain = torch.ones(HIDDEN, dtype=dtype)
        angles = torch.outer(torch.arange(8192), 1e-4 ** torch.linspace(0, 1, DIM // 2))
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.table = LoraTable(len(RANKS), LAYERS, SHAPES | ENDS, max(RANKS), dtype)
        for slot, rank in enumerate(RANKS):
            self._load(slot, rank)

    def _load(self, slot: int, rank: int) -> None:
        for layer in range(LAYERS):
            for group, shape in SHAPES.items():
                for i_slice in range(len(LAYER_GROUPS[group])):
                    a = torch.randn(rank, shape.in_features).to(self.dtype) / 100
                    b = torch.randn(rank, shape.out_features[i_slice]).to(self.dtype) / 100
                    self.table.set_module(slot, layer, group, i_slice, a, b, 2.0)


class Step:
    """The inputs of one step over requests of (context, rows), and its parts as functions."""

    def __init__(self, base: Base, requests: list[tuple[int, int]], slots: list[int]) -> None:
        self.base = base
        rows = sum(n for _, n in requests)
        num_blocks = [-(-length // BLOCK) for length, _ in requests]
        self.x = torch.randn(rows, HIDDEN).to(base.dtype)
        shape = (sum(num_blocks), BLOCK, KV_HEADS, DIM)
        self.caches = [[torch.randn(shape).to(base.dtype) for _ in range(2)] for _ in range(LAYERS)]
        self.tables = torch.zeros(len(requests), max(num_blocks), dtype=torch.int32)
        for row, ids in zip(self.tables, torch.split(torch.randperm(sum(num_blocks)), num_blocks), strict=True):
            row[: len(ids)] = ids
        self.query_start = torch.tensor([0, *(n for _, n in requests)]).cumsum(0).int()
        self.context_len = torch.tensor([length for length, _ in requests], dtype=torch.int32)
        self.positions = torch.cat([torch.arange(length - n, length) for length, n in requests])
        request = torch.repeat_interleave(torch.arange(len(requests)), torch.tensor([n for _, n in requests]))
        self.cells = self.tables[request, self.positions // BLOCK].long() * BLOCK + self.positions % BLOCK
        self.segments = build_segments([slot for slot, (_, n) in zip(slots, requests, strict=True) for _ in range(n)])

    def forward(self, segments: Segments | None) -> Tensor:
        """One whole step."""
        residual = self.x.clone()
        x = norm.rms_norm(residual, self.base.gain, 1e-5)
        for layer in range(LAYERS):
            qkv = self._linear(layer, "qkv", x, segments)
            mixed = self._mix(layer, self._rope(layer, qkv))
            x = norm.add_rms_norm(self._linear(layer, "o", mixed, segments), residual, self.base.gain, 1e-5)
            gated = activation.silu_and_mul(self._linear(layer, "gate_up", x, segments))
            x = norm.add_rms_norm(self._linear(layer, "down", gated, segments), residual, self.base.gain, 1e-5)
        return self.base.head(x[self.query_start[1:].long() - 1])

    def _linear(self, layer: int, group: str, x: Tensor, segments: Segments | None) -> Tensor:
        y = self.base.linears[layer][group](x)
        if segments is not None:
            lora_add(x, y, self.base.table, layer, group, segments)
        return y

    def _rope(self, layer: int, qkv: Tensor) -> Tensor:
        k, v = self.caches[layer]
        return rotary.rope_and_store(qkv, self.positions, self.base.cos_sin, k, v, self.cells, HEADS, KV_HEADS)

    def _mix(self, layer: int, q: Tensor) -> Tensor:
        k, v = self.caches[layer]
        return attention.paged_attention(q, k, v, self.tables, self.query_start, self.context_len, DIM**-0.5)

    def parts(self) -> Mapping[str, Callable[[], object]]:
        """What is timed, by name."""
        qkv = torch.randn(len(self.x), QKV).to(self.base.dtype)
        wide = torch.randn(len(self.x), 2 * INTERMEDIATE).to(self.base.dtype)
        mixed = torch.randn(len(self.x), HIDDEN).to(self.base.dtype)
        inputs = {g: torch.randn(len(self.x), s.in_features).to(self.base.dtype) for g, s in SHAPES.items()}
        outputs = {g: torch.randn(len(self.x), sum(s.out_features)).to(self.base.dtype) for g, s in SHAPES.items()}
        layers = range(LAYERS)

        def lora() -> None:
            assert self.segments is not None
            for layer in layers:
                for group, x in inputs.items():
                    lora_add(x, outputs[group], self.base.table, layer, group, self.segments)

        return {
            "linears and head": lambda: (
                [self.base.linears[i][g](x) for i in layers for g, x in inputs.items()],
                self.base.head(self.x[: len(self.context_len)]),
            ),
            "norms": lambda: [norm.add_rms_norm(mixed, self.x, self.base.gain, 1e-5) for _ in range(2 * LAYERS)],
            "silu": lambda: [activation.silu_and_mul(wide) for _ in layers],
            "rope and store": lambda: [self._rope(i, qkv) for i in layers],
            "attention": lambda: [self._mix(i, mixed) for i in layers],
            "lora": lora,
            "step, base": lambda: self.forward(None),
            "step, adapters": lambda: self.forward(self.segments),
        }


def measure(parts: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median milliseconds of each part, all parts in turn within each repeat."""
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats + 1):
        for name, part in parts.items():
            begin = clock()
            part()
            times[name].append((clock() - begin) * 1e3)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> None:
    """Print a table for a decode step of 16 rows over eight adapters, and for one long prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--prefill", type=int, default=0, help="tokens of a prompt to time as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    base = Base(getattr(torch, options.dtype))
    print(native_status())
    cases = {"decode, 16 rows, context 160": ([(160, 1)] * 16, [row % len(RANKS) for row in range(16)])}
    if options.prefill:
        cases[f"prefill, {options.prefill} rows, rank {RANKS[2]}"] = ([(options.prefill, options.prefill)], [2])
    with torch.inference_mode():
        for title, (requests, slots) in cases.items():
            print(f"{title} ({options.dtype}, {options.threads} threads), median ms")
            for name, value in measure(Step(base, requests, slots).parts(), options.repeats, clock).items():
                print(f"  {name:20} {value:8.2f}")


if __name__ == "__main__":
    main()
