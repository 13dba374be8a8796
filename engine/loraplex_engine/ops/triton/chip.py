"""The chips that Triton's kernels are tuned for, and how a kernel is launched on one. Knows no kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

HALF_DTYPES = (torch.bfloat16, torch.float16)
DTYPES = (*HALF_DTYPES, torch.float32)
CHIPS = (80, 90, 100)
"""Compute capabilities with rows of their own; another chip takes the newest row that is not newer than it."""
ALIGNMENT_BYTES = 16
"""What a program reads at once where every row begins at a multiple of it."""


@dataclass(frozen=True)
class Tile:
    """What the compiler is told about a kernel on a chip."""

    num_warps: int
    num_stages: int
    """Tiles on their way from memory at once."""
    reason: str

    @property
    def launch_options(self) -> dict[str, int | bool]:
        """What the compiler wants to know beside the constants."""
        # fused multiply-adds are said, not left to a default that differs between versions of Triton: they change bits
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


class Variant(Protocol):
    """One compilation of one kernel."""

    @property
    def op(self) -> str:
        """The op, as it is named in the table of kernels."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        ...

    @property
    def is_aligned(self) -> bool:
        """Whether every row begins at a multiple of `ALIGNMENT_BYTES`."""
        ...

    @property
    def detail(self) -> str:
        """What else tells it from the others of its op, in words."""
        ...

    def tile(self, chip: int) -> tuple[Tile, Mapping[str, int | bool]]:
        """The tile on a chip, and the constants it is compiled with."""
        ...


def find_chip(device: torch.device) -> int:
    """The chip whose rows serve a device; the oldest where the kernels are interpreted."""
    if device.type != "cuda":
        return CHIPS[0]
    major, minor = torch.cuda.get_device_capability(device)
    return max((chip for chip in CHIPS if chip <= 10 * major + minor), default=CHIPS[0])
