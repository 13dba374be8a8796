"""Times paged attention beside torch's own attention, in GFLOP/s, both in one process and in turn. Run by path.

    python tests/bench/bench_attention.py [--dtype bfloat16] [--threads 2] [--repeats 7]

Counted are the products of visible positions only. Torch gets what it is fastest with: dense keys and values of one
request at a time, already repeated for each head, its causal flag for a whole prompt and a prepared mask for a chunk.
Two threads mean something only while nothing else runs on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from loraplex_engine.ops.attention import paged_attention
from loraplex_engine.ops.native.build import native_status

BLOCK = 16
COPIES = 6
"""Caches that take turns, as layers do, so that none is warm by chance."""


@dataclass(frozen=True)
class Heads:
    """The shape of one layer's attention."""

    num: int
    num_kv: int
    dim: int


@dataclass(frozen=True)
class Case:
    """Requests of equal shape: the last `rows` positions of `context`."""

    name: str
    requests: int
    context: int
    rows: int

    def flops(self, heads: Heads) -> float:
        """Two products of two operations each for every head, row and visible position."""
        visible = sum(range(self.context - self.rows + 1, self.context + 1))
        return 4.0 * self.requests * heads.num * heads.dim * visible


SHAPES = [Heads(9, 3, 64), Heads(32, 8, 128)]
CASES = [
    Case("prompt of 512", 1, 512, 512),
    Case("prompt of 2,048", 1, 2048, 2048),
    Case("32 rows at 6,000", 1, 6000, 32),
    Case("200 rows at 6,000", 1, 6000, 200),
    Case("decode, 16 at 160", 16, 160, 1),
    Case("decode, 8 at 1,000", 8, 1000, 1),
    Case("decode, 8 at 6,000", 8, 6000, 1),
]


def build_paged(case: Case, heads: Heads, dtype: torch.dtype) -> Callable[[], object]:
    """Our op over shuffled blocks."""
    num_blocks = -(-case.context // BLOCK)
    shape = (case.requests * num_blocks, BLOCK, heads.num_kv, heads.dim)
    caches = [[torch.randn(shape).to(dtype) for _ in range(2)] for _ in range(COPIES)]
    tables = torch.randperm(case.requests * num_blocks).view(case.requests, num_blocks).int()
    query_start = (torch.arange(case.requests + 1) * case.rows).int()
    context_len = torch.full((case.requests,), case.context, dtype=torch.int32)
    q = torch.randn(case.requests * case.rows, heads.num * heads.dim).to(dtype)

    def run() -> None:
        for k, v in caches:
            paged_attention(q, k, v, tables, query_start, context_len, heads.dim**-0.5)

    return run


def build_stock(case: Case, heads: Heads, dtype: torch.dtype) -> Callable[[], object]:
    """Torch's op over dense tensors."""
    past = (case.requests, heads.num, case.context, heads.dim)
    caches = [[torch.randn(past).to(dtype) for _ in range(2)] for _ in range(COPIES)]
    q = torch.randn(case.requests, heads.num, case.rows, heads.dim).to(dtype)
    causal, mask = case.rows == case.context, None
    if 1 < case.rows < case.context:
        allowed = torch.ones(case.rows, case.context, dtype=torch.bool).tril(case.context - case.rows)
        mask = torch.zeros(case.rows, case.context).masked_fill(~allowed, -torch.inf).to(dtype)

    def run() -> None:
        for k, v in caches:
            scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=heads.dim**-0.5)

    return run


def measure(parts: list[Callable[[], object]], repeats: int, clock: Callable[[], float]) -> list[float]:
    """Median seconds of each part, all in turn within each repeat."""
    times: list[list[float]] = [[] for _ in parts]
    for _ in range(repeats + 1):
        for part, kept in zip(parts, times, strict=True):
            begin = clock()
            part()
            kept.append(clock() - begin)
    return [statistics.median(kept[1:]) / COPIES for kept in times]


def main() -> None:
    """Print a table for each shape of heads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    dtype = getattr(torch, options.dtype)
    print(native_status())
    for heads in SHAPES:
        print(f"{heads} ({options.dtype}, {options.threads} threads): median ms a layer, GFLOP/s")
        print(f"  {'':20} {'ours':>8} {'':>7} {'torch':>10} {'':>7} {'ratio':>7}")
        for case in CASES:
            work = case.flops(heads) / 1e9
            builds: list[Callable[[Case, Heads, torch.dtype], Callable[[], object]]] = [build_paged, build_stock]
            with torch.inference_mode():
                ours, stock = measure([b(case, heads, dtype) for b in builds], options.repeats, clock)
            print(
                f"  {case.name:20} {ours * 1e3:8.3f} {work / ours:7.0f} {stock * 1e3:10.3f} {work / stock:7.0f}"
                f" {stock / ours:7.2f}"
            )


if __name__ == "__main__":
    main()
