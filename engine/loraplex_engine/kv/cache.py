"""Device tensors of the KV cache, allocated once at start. The model's ops write them; `BlockPool` says which cells."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from loraplex_engine.kv.reservation import Reservation


class KVCache:
    """K and V of every layer, each [B, block_size, G, D]; `k` and `v` are views of one tensor [2 * L, B, ...]."""

    def __init__(self, tensors: Tensor) -> None:
        num_layers = len(tensors) // 2
        self.k = list(tensors[:num_layers])
        self.v = list(tensors[num_layers:])
        self._tensors = tensors

    def fill(self, block_ids: list[int], value: float) -> None:
        """Overwrite whole blocks in every layer."""
        self._tensors[:, block_ids] = value

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to) in every layer; no block may be both."""
        for source, target in pairs:
            self._tensors[:, target].copy_(self._tensors[:, source])


def build_kv_cache(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    memory: Reservation | None = None,
) -> KVCache:
    """Lay the pool out in memory whose pages are really there before the first request.

    Args:
        num_layers: L.
        num_blocks: B.
        block_size: positions of a block.
        num_kv_heads: G.
        head_dim: D.
        dtype: of K and V.
        memory: as many bytes as the pool has, reserved before; None: reserve it here.
    """
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    tensor_bytes = prod(shape) * dtype.itemsize
    memory = memory or Reservation(2 * num_layers * tensor_bytes)
    flat = torch.frombuffer(memory.wait(), dtype=dtype, count=2 * num_layers * prod(shape))
    return KVCache(flat.view(2 * num_layers, *shape))
