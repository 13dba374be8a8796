"""How much of its rank a LoRA uses: the singular values of each module's update, computed from the stored tensors.

Of `dW = scaling * B A` with B [out, r] and A [r, in] only r singular values are not zero, and with `B = Qb Rb` and
`A^T = Qa Ra` they are those of the r by r matrix `scaling * Rb Ra^T`: dW itself is never built. All in float64.

*Effective rank* is `exp(-sum p ln p)` with `p` the singular values over their sum (Roy and Vetterli): r if all are
equal, 1 if one carries everything. *Saturation* is effective rank over rank. *Mass* is a share of the sum of squares.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.spec import AdapterPlan, LoraModule, TensorRef

Matrix = npt.NDArray[np.float64]
SHARES = (0.5, 0.9, 0.99)
"""Of the mass, for which the number of singular values is told."""

SATURATED = 0.8
"""A module whose saturation is this or more leaves little of its rank unused."""

_MAX_TENSOR_BYTES = 1 << 30
_DTYPES: dict[str, npt.DTypeLike] = {"F32": "<f4", "F16": "<f2"}


class ModuleSaturation(msgspec.Struct, frozen=True):
    """One module: `norm` is the Frobenius norm of its update, `mass_50` and so on how many values carry that share."""

    path: str
    rank: int
    norm: float
    effective_rank: float
    saturation: float
    mass_50: int
    mass_90: int
    mass_99: int


class Saturation(msgspec.Struct, frozen=True):
    """All modules of one adapter, and what they come to.

    `mean_saturation` is weighted by the squares of the norms: modules that change nothing say nothing.
    """

    rank: int
    num_modules: int
    num_saturated: int
    mean_saturation: float
    mean_effective_rank: float
    modules: tuple[ModuleSaturation, ...]


def measure_adapter(plan: AdapterPlan, descriptor: int) -> Saturation:
    """Measure every LoRA module of a plan.

    Args:
        plan: Says where the tensors lie, and how they are scaled.
        descriptor: The safetensors file, open for reading; its position is left alone.

    Raises:
        AdapterFileError: A tensor cannot be read, or is too large for this.
        OSError: The file cannot be read.
    """
    modules = tuple(_measure_module(module, descriptor) for module in plan.modules)
    return Saturation(
        rank=plan.rank,
        num_modules=len(modules),
        num_saturated=sum(module.saturation >= SATURATED for module in modules),
        mean_saturation=_mean([module.saturation for module in modules], modules),
        mean_effective_rank=_mean([module.effective_rank for module in modules], modules),
        modules=modules,
    )


def measure(path: str, values: Sequence[float] | Matrix, rank: int) -> ModuleSaturation:
    """Return the figures of one module from the singular values of its update, in any order."""
    found = np.sort(np.asarray(values, dtype=np.float64))[::-1]
    largest = float(found[0])
    if not largest > 0:
        return ModuleSaturation(path, rank, 0.0, 0.0, 0.0, 0, 0, 0)
    # so that sums and squares of large values stay finite
    scaled = found / largest
    shares = scaled / scaled.sum()
    shares = shares[shares > 0]
    effective_rank = float(np.exp(-np.sum(shares * np.log(shares))))
    mass = np.cumsum(scaled**2)
    norm = min(largest * float(np.sqrt(mass[-1])), sys.float_info.max)
    counts = [int(np.searchsorted(mass / mass[-1], share - 1e-12) + 1) for share in SHARES]
    return ModuleSaturation(path, rank, norm, effective_rank, effective_rank / rank, *counts)


def find_singular_values(a: Matrix, b: Matrix, scaling: float) -> Matrix:
    """Return the singular values of `scaling * b @ a`, with a [r, in] and b [out, r]: at most r of them."""
    values: Matrix = np.linalg.svd(_reduce(b) @ _reduce(a.T).T, compute_uv=False).astype(np.float64)
    return values * abs(scaling)


def _reduce(matrix: Matrix) -> Matrix:
    """Return R of the matrix' QR decomposition."""
    found: Any = np.linalg.qr(matrix, mode="r")
    reduced: Matrix = found
    return reduced


def _measure_module(module: LoraModule, descriptor: int) -> ModuleSaturation:
    a, b = _read(module.a, descriptor), _read(module.b, descriptor)
    if module.is_transposed:
        a, b = a.T, b.T
    return measure(module.path, find_singular_values(a, b, module.scaling), module.rank)


def _read(ref: TensorRef, descriptor: int) -> Matrix:
    size = ref.stop - ref.start
    if size > _MAX_TENSOR_BYTES:
        raise AdapterFileError("file_size", f"{ref.name} is too large to be measured.", ref.name)
    data = bytearray()
    while len(data) < size:
        piece = os.pread(descriptor, size - len(data), ref.start + len(data))
        if not piece:
            raise AdapterFileError("truncated", f"The file ends inside {ref.name}.", ref.name)
        data += piece
    return _decode(bytes(data), ref.dtype).reshape(ref.shape)


def _decode(data: bytes, dtype: str) -> Matrix:
    if dtype == "BF16":
        bits: Any = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        found: Matrix = bits.view(np.float32).astype(np.float64)
        return found
    return np.frombuffer(data, _DTYPES[dtype]).astype(np.float64)


def _mean(values: Sequence[float], modules: Sequence[ModuleSaturation]) -> float:
    largest = max((module.norm for module in modules), default=0.0)
    if not largest:
        return 0.0
    weights = [(module.norm / largest) ** 2 for module in modules]
    return fmean(values, weights)
