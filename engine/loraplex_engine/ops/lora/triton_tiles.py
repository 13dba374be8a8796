"""Tiles of the Triton kernels, as data: one row per chip, op and kind of dtype, with the reason for each number.

Tiles and planes decide the order of every sum, so they depend on K, dtype and chip alone, never on how many rows a step
has. BLOCK_T is `CHUNK_ROWS` everywhere, for prefill and decode alike: from 64 rows on the compiler chooses other
instructions, and a row's bits would depend on its company.

NOTE: no number has been measured on a GPU yet; each follows from its reason. `tests/bench/bench_gpu_kernels.py` prints
what a GPU makes of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from loraplex_engine.ops.lora.segment import CHUNK_ROWS
from loraplex_engine.ops.triton.chip import DTYPES, HALF_DTYPES, Tile

MAX_PLANES = 8
"""What expand has to read again for every block of columns."""
PLANE_FEATURES = 512
"""K from which another plane pays: four tiles of 128, enough to fill the pipeline of copies."""


@dataclass(frozen=True)
class ShrinkTile(Tile):
    """How shrink cuts its work."""

    block_r: int
    """Ranks of one product."""
    block_k: int
    """Input features of one product."""
    program_ranks: int
    """Ranks that one program takes, one product after the other."""

    def constants(self, *, is_aligned: bool) -> dict[str, int | bool]:
        """The kernel's compile-time arguments."""
        return {
            "BLOCK_T": CHUNK_ROWS,
            "BLOCK_R": self.block_r,
            "BLOCK_K": self.block_k,
            "PROGRAM_RANKS": self.program_ranks,
            "IS_ALIGNED": is_aligned,
        }


@dataclass(frozen=True)
class ExpandTile(Tile):
    """How expand cuts its work."""

    block_r: int
    """Ranks of one product."""
    block_o: int
    """Output columns of one program."""

    def constants(self, *, planes: int, is_aligned: bool) -> dict[str, int | bool]:
        """The kernel's compile-time arguments."""
        return {
            "BLOCK_T": CHUNK_ROWS,
            "BLOCK_R": self.block_r,
            "BLOCK_O": self.block_o,
            "PLANES": planes,
            "IS_ALIGNED": is_aligned,
        }


def _shrink(num_warps: int, num_stages: int, block_k: int, reason: str) -> ShrinkTile:
    # 16 ranks are the least that tl.dot takes, and a rank-8 adapter must not pay for more
    return ShrinkTile(num_warps, num_stages, reason, 16, block_k, program_ranks=64)


def _expand(num_warps: int, num_stages: int, block_o: int, reason: str) -> ExpandTile:
    return ExpandTile(num_warps, num_stages, reason, 16, block_o)


SHRINK_TILES: Mapping[tuple[int, bool], ShrinkTile] = {
    # (chip, is half)
    (80, True): _shrink(2, 4, 128, "one warp per 8 of 16 ranks; 4 tiles of 8 KiB in flight cover the latency of HBM2e"),
    (90, True): _shrink(2, 5, 128, "as 80; one tile more in flight, since HBM3 moves more in the same latency"),
    (100, True): _shrink(2, 5, 128, "as 90; 16 rows stay on mma.sync, as tcgen05 begins at 64"),
    (80, False): _shrink(
        4, 2, 64, "no tensor cores in float32: 4 warps share the products, half of K for the same bytes"
    ),
    (90, False): _shrink(4, 2, 64, "as 80"),
    (100, False): _shrink(4, 2, 64, "as 80"),
}

EXPAND_TILES: Mapping[tuple[int, bool], ExpandTile] = {
    (80, True): _expand(4, 2, 128, "128 columns are 256 bytes of a row of B and of y, whole sectors; a warp takes 32"),
    (90, True): _expand(4, 3, 128, "as 80; one tile more in flight, for ranks above 32"),
    (100, True): _expand(4, 3, 128, "as 90"),
    (80, False): _expand(4, 2, 64, "64 columns are again 256 bytes"),
    (90, False): _expand(4, 2, 64, "as 80"),
    (100, False): _expand(4, 2, 64, "as 80"),
}


def num_planes(in_features: int) -> int:
    """Into how many planes shrink divides its sum over K: a power of two, which expand adds up in order."""
    return min(MAX_PLANES, 1 << max(0, (in_features // PLANE_FEATURES).bit_length() - 1))


@dataclass(frozen=True)
class LoraVariant:
    """One compilation of shrink or expand."""

    op: str
    """`shrink` or `expand`."""
    dtype: torch.dtype
    is_aligned: bool
    planes: int
    """1 of shrink, whose planes are in the grid."""

    @property
    def detail(self) -> str:
        """See `Variant.detail`."""
        if self.op == "shrink":
            return ""
        return "1 plane" if self.planes == 1 else f"{self.planes} planes"

    def tile(self, chip: int) -> tuple[Tile, dict[str, int | bool]]:
        """See `Variant.tile`."""
        key = chip, self.dtype in HALF_DTYPES
        if self.op == "shrink":
            shrink = SHRINK_TILES[key]
            return shrink, shrink.constants(is_aligned=self.is_aligned)
        expand = EXPAND_TILES[key]
        return expand, expand.constants(planes=self.planes, is_aligned=self.is_aligned)


def lora_variants() -> Iterator[LoraVariant]:
    """All that the Triton form can launch on a chip, whatever the model."""
    for dtype, is_aligned in itertools.product(DTYPES, (True, False)):
        yield LoraVariant("shrink", dtype, is_aligned, 1)
        for exponent in range(MAX_PLANES.bit_length()):
            yield LoraVariant("expand", dtype, is_aligned, 1 << exponent)
