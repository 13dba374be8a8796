"""Rotary position embedding: which scalings are served, and the table of angles that the ops read.

The formulas are those of the papers as `transformers` computes them, in float32 in the same order, so that angles at
large positions agree to the bit. Parsing needs no torch; `build_cos_sin` imports it when called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loraplex_engine.errors import BaseUnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # kind: keys it must have, keys it may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions become angles: the kind, its base frequency, and the parameters of its scaling."""

    kind: str
    theta: float
    original_len: int
    parameters: tuple[tuple[str, float], ...] = ()

    def get(self, key: str, default: float = 0.0) -> float:
        """The value of one parameter of the scaling."""
        return dict(self.parameters).get(key, default)


def parse_rope(config: Mapping[str, Any]) -> Rope:
    """Read either spelling: `rope_theta` with `rope_scaling`, or `rope_parameters`.

    Raises:
        BaseUnsupportedError: a scaling, or a key of one, that is not served; the message names it.
    """
    scaling = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in ROPE_KINDS:
        raise BaseUnsupportedError(f"Rope scaling {kind!r} is not served; served are {', '.join(ROPE_KINDS)}.")
    _check_keys(kind, scaling)
    _check_plain(config, scaling)
    required, optional = _KEYS[kind]
    return Rope(
        kind=kind,
        theta=float(scaling.get("rope_theta", config.get("rope_theta", 10000.0))),
        original_len=_original_len(config, scaling),
        parameters=tuple((key, float(scaling[key])) for key in (*required, *optional) if scaling.get(key) is not None),
    )


def _original_len(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    key = "original_max_position_embeddings"
    return int(config.get(key) or scaling.get(key) or config["max_position_embeddings"])


def _check_keys(kind: str, scaling: Mapping[str, Any]) -> None:
    required, optional = _KEYS[kind]
    if missing := [key for key in required if not isinstance(scaling.get(key), (int, float))]:
        raise BaseUnsupportedError(f"Rope scaling {kind!r} lacks the number {missing[0]!r} in config.json.")
    known = _COMMON_KEYS | set(required) | set(optional)
    if unknown := sorted(key for key, value in scaling.items() if key not in known and value is not None):
        raise BaseUnsupportedError(f"Rope scaling {kind!r} with the key {unknown[0]!r} is not served.")


def _check_plain(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> None:
    if (scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise BaseUnsupportedError("A partial_rotary_factor other than 1 is not served.")
    if config.get("rope_interleaved"):
        raise BaseUnsupportedError("rope_interleaved is not served.")


def build_cos_sin(rope: Rope, head_dim: int, max_len: int, dtype: torch.dtype) -> Tensor:
    """The angles of positions 0 to max_len - 1: [max_len, D], D / 2 cosines, then D / 2 sines.

    float32 whatever the model's `dtype`, but float64 in a float64 model, whose angles are float32's too: that is how
    `transformers` computes them.
    """
    import torch

    frequencies, scale = _frequencies(rope, head_dim)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)
    return table.double() if dtype is torch.float64 else table


def _frequencies(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    import torch

    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.get("factor"), 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, powers, head_dim), _yarn_scale(rope)
    return plain, 1.0


def _llama3_frequencies(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    import torch

    factor, low, high = rope.get("factor"), rope.get("low_freq_factor"), rope.get("high_freq_factor")
    wavelength = 2 * math.pi / plain
    is_long = wavelength > rope.original_len / low
    is_medium = ~is_long & ~(wavelength < rope.original_len / high)
    scaled = torch.where(is_long, plain / factor, plain)
    smooth = (rope.original_len / wavelength - low) / (high - low)
    return torch.where(is_medium, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn_frequencies(rope: Rope, powers: torch.Tensor, head_dim: int) -> torch.Tensor:
    import torch

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_len / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.get("beta_fast") or 32), dimension_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    keep = 1 - torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width, 0, 1)
    return 1.0 / (rope.get("factor") * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_scale(rope: Rope) -> float:
    factor, mscale, mscale_all = rope.get("factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    if given := rope.get("attention_factor"):
        return given
    if mscale and mscale_all:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
