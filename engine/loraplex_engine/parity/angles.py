"""Rotary angles in numpy: the scalings that `models.rope` builds with torch, which this process has not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex_engine.models.rope import Rope

Array = NDArray[np.float32]


def build_angles(rope: Rope, head_dim: int, num_positions: int) -> tuple[Array, Array]:
    """Cosines and sines of positions 0 to num_positions - 1, each [num_positions, head_dim / 2]."""
    exponents = np.arange(0, head_dim, 2) / head_dim
    plain = rope.theta**-exponents
    scale = 1.0
    if rope.kind == "linear":
        plain = plain / rope.get("factor")
    elif rope.kind == "llama3":
        plain = _stretch_long_waves(rope, plain)
    elif rope.kind == "yarn":
        plain, scale = _blend(rope, plain, head_dim), _attention_factor(rope)
    angles = np.arange(num_positions)[:, None] * plain
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)


def _stretch_long_waves(rope: Rope, plain: NDArray[Any]) -> NDArray[Any]:
    """Llama 3: waves longer than the original context are slowed down, those in between partly."""
    factor, low, high = rope.get("factor"), rope.get("low_freq_factor"), rope.get("high_freq_factor")
    turns = rope.original_len * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(kept * plain + (1 - kept) * plain / factor)


def _blend(rope: Rope, plain: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """YaRN: dimensions that turn often are kept, those that turn rarely slowed down, a ramp in between."""

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(rope.original_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.get("beta_fast") or 32), dimension_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    slowed = np.clip((np.arange(head_dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    return np.asarray(plain * (1 - slowed) + plain / rope.get("factor") * slowed)


def _attention_factor(rope: Rope) -> float:
    """What YaRN multiplies cosines and sines with."""
    factor, mscale, of_all = rope.get("factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    if given := rope.get("attention_factor"):
        return given
    if factor <= 1:
        return 1.0
    gain = 0.1 * math.log(factor)
    return (gain * mscale + 1) / (gain * of_all + 1) if mscale and of_all else gain + 1
