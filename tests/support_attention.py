"""Random steps for paged attention, on any device: everything that must not be read is NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class History:
    """One request's keys, values and queries for every position."""

    q: Tensor  # [n, H * D]
    k: Tensor  # [n, G, D]
    v: Tensor


@dataclass(frozen=True)
class PagedBatch:
    """Arguments of `paged_attention`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_len: Tensor

    def arguments(self) -> tuple[Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.query_start, self.context_len

    def double(self) -> tuple[Tensor, ...]:
        """The same in float64, on the host."""
        wide = (self.q.double(), self.k_cache.double(), self.v_cache.double())
        return tuple(t.cpu() for t in (*wide, self.block_tables, self.query_start, self.context_len))


def make_history(length: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> History:
    """Normally distributed numbers."""
    shapes = ((length, heads * dim), (length, kv_heads, dim), (length, kv_heads, dim))
    return History(*(torch.randn(shape, device=device).to(dtype) for shape in shapes))


def page(chunks: Sequence[tuple[History, int, int]], block_size: int = 16) -> PagedBatch:
    """Lay (history, first row, end) out in shuffled blocks; at and past the end there is NaN, or no block at all."""
    k = chunks[0][0].k
    num_blocks = [math.ceil(end / block_size) for _, _, end in chunks]
    total = sum(num_blocks) + 5
    ids = torch.randperm(total).split([*num_blocks, 5])
    k_cache, v_cache = (k.new_full((total, block_size, *k.shape[1:]), torch.nan) for _ in range(2))
    tables = torch.full((len(chunks), max(num_blocks) + 2), -1, dtype=torch.int32)
    for i, (history, _, end) in enumerate(chunks):
        tables[i, : num_blocks[i]] = ids[i]
        cells = ids[i].repeat_interleave(block_size) * block_size + torch.arange(block_size).repeat(num_blocks[i])
        cells = cells[:end].to(k.device)
        k_cache.flatten(0, 1)[cells] = history.k[:end]
        v_cache.flatten(0, 1)[cells] = history.v[:end]
    sizes = torch.tensor([0, *(end - begin for _, begin, end in chunks)])
    return PagedBatch(
        q=torch.cat([history.q[begin:end] for history, begin, end in chunks]),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables.to(k.device),
        query_start=sizes.cumsum(0).to(k.device, torch.int32),
        context_len=torch.tensor([end for _, _, end in chunks], dtype=torch.int32, device=k.device),
    )
