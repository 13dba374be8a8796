"""Tiles of paged attention, as data: one row per chip, kind of dtype and head dim, with the reason for each number.

A tile decides the order of a row's sums, so it depends on head dim, dtype and chip alone, never on how many rows or
requests a step has or how long they are: prefill, chunk and decode share it.

NOTE: no number has been measured on a GPU yet; each follows from its reason. `tests/bench/bench_gpu_kernels.py` prints
what a GPU makes of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from loraplex_engine.ops.triton.chip import ALIGNMENT_BYTES, DTYPES, HALF_DTYPES, Tile

PADDED_DIMS = (64, 128, 256)
"""Head dims with rows of their own; others are padded, by masks, to the next."""


@dataclass(frozen=True)
class AttentionTile(Tile):
    """How attention cuts its work."""

    block_m: int
    """(token, head) pairs of one program: as many tokens as fit with all heads of a KV head."""
    block_n: int
    """Positions of one tile of keys and values; tiles begin at its multiples."""

    def constants(self, padded_dim: int) -> dict[str, int | bool]:
        """The kernel's compile-time arguments."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_D": padded_dim}


def _tile(block_m: int, block_n: int, num_warps: int, num_stages: int, reason: str) -> AttentionTile:
    return AttentionTile(num_warps, num_stages, reason, block_m, block_n)


ATTENTION_TILES: Mapping[tuple[int, bool, int], AttentionTile] = {
    # (chip, is half, padded head dim); of three stages one is the block table's, so a tile arrives while one is at work
    (80, True, 64): _tile(64, 64, 4, 3, "16 rows a warp; 64 positions are 16 KiB of keys and values on their way"),
    (80, True, 128): _tile(64, 32, 4, 3, "as 64, the same bytes; more positions would spill registers"),
    (80, True, 256): _tile(64, 32, 8, 3, "twice the warps share sums of 64 x 256"),
    (90, True, 64): _tile(64, 64, 4, 3, "64 rows are the least of wgmma; those that a decode lacks cost no memory"),
    (90, True, 128): _tile(
        64, 64, 4, 3, "as 64; 32 KiB on their way are what HBM3 moves in its latency, and half more"
    ),
    (90, True, 256): _tile(64, 32, 8, 3, "the bytes of 128; twice the warps share sums of 64 x 256"),
    (100, True, 64): _tile(64, 64, 4, 3, "64 rows are the least of tcgen05, and otherwise as 90"),
    (100, True, 128): _tile(64, 64, 4, 3, "as 90"),
    (100, True, 256): _tile(64, 32, 8, 3, "as 90"),
    (80, False, 64): _tile(16, 32, 4, 2, "no tensor cores in float32, so every row costs: as few as tl.dot takes"),
    (80, False, 128): _tile(16, 16, 8, 3, "as 64; twice the warps for twice the sums, and more positions would spill"),
    (80, False, 256): _tile(16, 16, 8, 3, "as 128"),
    (90, False, 64): _tile(16, 32, 4, 2, "as 80"),
    (90, False, 128): _tile(16, 16, 8, 3, "as 80"),
    (90, False, 256): _tile(16, 16, 8, 3, "as 80"),
    (100, False, 64): _tile(16, 32, 4, 2, "as 80"),
    (100, False, 128): _tile(16, 16, 8, 3, "as 80"),
    (100, False, 256): _tile(16, 16, 8, 3, "as 80"),
}


def find_padded_dim(head_dim: int) -> int | None:
    """The head dim whose tile serves this one; None if none does.

    Rows of other than whole `ALIGNMENT_BYTES` would be read number by number, for which there are too few registers.
    """
    if head_dim % (ALIGNMENT_BYTES // 2):
        return None
    return next((padded for padded in PADDED_DIMS if head_dim <= padded), None)


@dataclass(frozen=True)
class AttentionVariant:
    """One compilation of the attention kernel."""

    dtype: torch.dtype
    padded_dim: int
    op: str = "attention"
    is_aligned: bool = True

    @property
    def detail(self) -> str:
        """See `Variant.detail`."""
        return f"head dim {self.padded_dim}"

    def tile(self, chip: int) -> tuple[AttentionTile, dict[str, int | bool]]:
        """See `Variant.tile`."""
        tile = ATTENTION_TILES[chip, self.dtype in HALF_DTYPES, self.padded_dim]
        return tile, tile.constants(self.padded_dim)


def attention_variants() -> Iterator[AttentionVariant]:
    """All that the Triton form can launch on a chip, whatever the model."""
    for dtype, padded_dim in itertools.product(DTYPES, PADDED_DIMS):
        yield AttentionVariant(dtype, padded_dim)
