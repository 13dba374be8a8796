"""Device tensors of the KV cache, allocated once at start. The model's ops write them; `BlockPool` says which cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """K and V of every layer, each [B, block_size, G, D]."""

    k: list[Tensor]
    v: list[Tensor]

    def fill(self, block_ids: list[int], value: float) -> None:
        """Overwrite whole blocks in every layer."""
        for tensor in (*self.k, *self.v):
            tensor[block_ids] = value

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to) in every layer; no block may be both."""
        sources, targets = map(list, zip(*pairs, strict=True))
        for tensor in (*self.k, *self.v):
            tensor[targets] = tensor[sources]


def build_kv_cache(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KVCache:
    """Allocate the pool, zeroed so that the pages are really there before the first request."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return KVCache(
        k=[torch.zeros(shape, dtype=dtype) for _ in range(num_layers)],
        v=[torch.zeros(shape, dtype=dtype) for _ in range(num_layers)],
    )


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, K and V."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
