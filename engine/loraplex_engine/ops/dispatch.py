"""Which form of each op serves which device and dtype: the one place where a form is chosen.

A device and dtype get their own kernels by a row in `_BUILDERS`; what has no row is served by the torch form. float64
on the CPU is served by the naive form, so that the whole model can run as its own definition.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraplex_engine.ops import naive, torch_form
from loraplex_engine.ops.lora import naive as lora_naive
from loraplex_engine.ops.lora import torch_form as lora_torch_form
from loraplex_engine.ops.native import cpu as lora_native
from loraplex_engine.ops.native.build import native_status
from loraplex_engine.ops.sampling import naive as sampling_naive
from loraplex_engine.ops.sampling import native_form as sampling_native
from loraplex_engine.ops.sampling import torch_form as sampling_torch_form
from loraplex_engine.ops.sampling.row import Chosen, Scored


@dataclass(frozen=True)
class Kernels:
    """One implementation of every op; signatures and semantics are those of the op modules."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    head_rms_norm: Callable[[Tensor, Tensor, Tensor, float, int, int], None]
    silu_and_mul: Callable[[Tensor], Tensor]
    plain_linear: Callable[[Tensor, Tensor], Tensor]
    rope_and_store: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    lora_shrink: Callable[..., Tensor]
    lora_expand: Callable[..., None]
    lora_add: Callable[..., None]
    choose_greedy: Callable[[Tensor], Tensor]
    choose_tokens: Callable[..., Chosen]
    score_tokens: Callable[[Tensor, Tensor, int], Scored]


def _naive_kernels() -> Kernels:
    return Kernels(
        name="naive",
        rms_norm=naive.rms_norm,
        add_rms_norm=naive.add_rms_norm,
        head_rms_norm=naive.head_rms_norm,
        silu_and_mul=naive.silu_and_mul,
        plain_linear=naive.plain_linear,
        rope_and_store=naive.rope_and_store,
        paged_attention=naive.paged_attention,
        lora_shrink=lora_naive.lora_shrink,
        lora_expand=lora_naive.lora_expand,
        lora_add=lora_naive.lora_add,
        choose_greedy=sampling_naive.choose_greedy,
        choose_tokens=sampling_naive.choose_tokens,
        score_tokens=sampling_naive.score_tokens,
    )


def _torch_kernels() -> Kernels:
    return replace(
        _naive_kernels(),
        name="torch",
        plain_linear=torch_form.plain_linear,
        paged_attention=torch_form.paged_attention,
        lora_shrink=lora_torch_form.lora_shrink,
        lora_expand=lora_torch_form.lora_expand,
        lora_add=lora_torch_form.lora_add,
        choose_tokens=sampling_torch_form.choose_tokens,
        score_tokens=sampling_torch_form.score_tokens,
    )


def _cpu_kernels() -> Kernels:
    if native_status().form != "native":
        return _torch_kernels()
    ops = torch.ops.loraplex
    return Kernels(
        name="native",
        rms_norm=ops.rms_norm.default,
        add_rms_norm=ops.add_rms_norm.default,
        head_rms_norm=ops.head_rms_norm.default,
        silu_and_mul=ops.silu_and_mul.default,
        plain_linear=ops.plain_linear.default,
        rope_and_store=ops.rope_and_store.default,
        paged_attention=ops.paged_attention.default,
        lora_shrink=lora_native.lora_shrink,
        lora_expand=lora_native.lora_expand,
        lora_add=lora_native.lora_add,
        choose_greedy=ops.choose_greedy.default,
        choose_tokens=sampling_native.choose_tokens,
        score_tokens=sampling_native.score_tokens,
    )


def _cuda_kernels() -> Kernels:
    if importlib.util.find_spec("triton") is None:
        return _torch_kernels()
    from loraplex_engine.ops.lora import triton_form
    from loraplex_engine.ops.triton import attention

    return replace(
        _torch_kernels(),
        name="triton",
        paged_attention=attention.paged_attention,
        lora_shrink=triton_form.lora_shrink,
        lora_expand=triton_form.lora_expand,
        lora_add=triton_form.lora_add,
    )


_BUILDERS: Mapping[tuple[str, torch.dtype], Callable[[], Kernels]] = {
    ("cpu", torch.float32): _cpu_kernels,
    ("cpu", torch.bfloat16): _cpu_kernels,
    ("cpu", torch.float64): _naive_kernels,
    ("cuda", torch.float32): _cuda_kernels,
    ("cuda", torch.bfloat16): _cuda_kernels,
    ("cuda", torch.float16): _cuda_kernels,
}


@functools.cache
def select_kernels(device_type: str, dtype: torch.dtype) -> Kernels:
    """The kernels for a device type (`cpu`, `cuda`) and a model dtype."""
    return _BUILDERS.get((device_type, dtype), _torch_kernels)()


def kernels_for(x: Tensor) -> Kernels:
    """The kernels that serve tensors like `x`."""
    # asked some hundred times a step, and a device takes longer to make than all else here
    return select_kernels("cpu" if x.is_cpu else x.device.type, x.dtype)
