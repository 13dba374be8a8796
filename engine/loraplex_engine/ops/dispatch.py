"""Which form of each op serves which device and dtype: the one place where a form is chosen.

A device gets its own kernels by a row in `_BUILDERS`; what has no row is served by the torch form. float64 is always
served by the naive form, so that the whole model can run as its own definition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_engine.ops import naive
from loraplex_engine.ops.lora import naive as lora_naive


@dataclass(frozen=True)
class Kernels:
    """One implementation of every op; signatures and semantics are those of the op modules."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    head_rms_norm: Callable[[Tensor, Tensor, Tensor, float, int, int], None]
    silu_and_mul: Callable[[Tensor], Tensor]
    rope_and_store: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    lora_shrink: Callable[..., Tensor]
    lora_expand: Callable[..., None]
    lora_add: Callable[..., None]


def _naive_kernels() -> Kernels:
    return Kernels(
        name="naive",
        rms_norm=naive.rms_norm,
        add_rms_norm=naive.add_rms_norm,
        head_rms_norm=naive.head_rms_norm,
        silu_and_mul=naive.silu_and_mul,
        rope_and_store=naive.rope_and_store,
        paged_attention=naive.paged_attention,
        lora_shrink=lora_naive.lora_shrink,
        lora_expand=lora_naive.lora_expand,
        lora_add=lora_naive.lora_add,
    )


_BUILDERS: Mapping[str, Callable[[], Kernels]] = {}


@functools.cache
def _select(device_type: str, dtype: torch.dtype) -> Kernels:
    if dtype is torch.float64:
        return _naive_kernels()
    return _BUILDERS.get(device_type, _naive_kernels)()


def kernels_for(x: Tensor) -> Kernels:
    """The kernels that serve tensors like `x`."""
    return _select(x.device.type, x.dtype)
