"""The one seam through which every base linear goes, and `plain_linear` for what adapters put in the place of one.

`PackedLinear` owns the only copy of its weight: in oneDNN's blocked layout where a probe proves that the private torch
ops for it work here, else as it is. `probe_row_invariance` says whether this machine keeps the promise that a row's
bits do not depend on its company.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from loraplex_engine.ops.dispatch import kernels_for

# NOTE: one layout must serve every number of rows. A hint of 1 gives float32 a layout for matrix-vector products, with
# which 2 to 128 rows took up to twice as long (Zen 4, 576 x 3072); hints of 16, 128, 512 and none gave the same times.
_LAYOUT_ROWS = 16

_PROBED_ROWS = (*range(1, 18), *range(31, 34), *range(63, 66), *range(127, 130))
_MOST_PROBED_ROWS = 512
_MOST_SHIFTED_ROWS = 65

_MKLDNN: Any = torch.ops.mkldnn


class PackedLinear:
    """`y = x W^T + bias`, the weight held once in the form that is fastest here."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack a weight.

        Args:
            weight: [O, K]; a packed layer keeps no reference to it, a plain one keeps it as it is.
            bias: [O] or None.
        """
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.is_packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self._weight = _pack(weight) if self.is_packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to rows.

        Args:
            x: [T, K] contiguous, in the weight's dtype.

        Returns:
            A new tensor [T, O].
        """
        if self.is_packed:
            return _apply_packed(x, self._weight, self._bias)
        return functional.linear(x, self._weight, self._bias)


def plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows by a weight as it lies in a file: the head, or some rows of it, that one adapter brings along.

    *Semantics*: `y = x W^T`, accumulated in float32 in an order that depends on K alone, rounded once. A row's bits do
    not depend on the other rows, nor on which rows of W there are (except in the torch form).

    Args:
        x: rows, [n, K] contiguous.
        weight: [O, K] contiguous, in the dtype of `x`.

    Returns:
        A new tensor [n, O].
    """
    return kernels_for(x).plain_linear(x, weight)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed linear works here for a dtype; tried once per process, off by LORAPLEX_NATIVE=0."""
    if os.environ.get("LORAPLEX_NATIVE", "1") == "0" or dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        return _packed_agrees(dtype)
    except (AttributeError, RuntimeError, TypeError):
        # the ops are private: absent, or with other arguments, in another build
        return False


def probe_row_invariance(linears: Iterable[PackedLinear]) -> bool:
    """Whether a row's result is the same bits for every number of rows beside it.

    Every different (K, O, dtype) is tried with 1 to 512 rows; up to 65, at another place of the batch too.

    Args:
        linears: the linears of the base model, the head among them.
    """
    different = {(linear.in_features, linear.out_features, linear.dtype): linear for linear in linears}
    return all(_is_row_invariant(linear) for linear in different.values())


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = _MKLDNN._reorder_linear_weight(weight.detach(), _LAYOUT_ROWS)
    return packed


def _apply_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    num_rows = x.shape[0]
    if num_rows == 0:
        return x.new_empty(0, packed.shape[0])
    if num_rows == 1:
        # one row alone takes another kernel, with other bits
        x = x.repeat(2, 1)
    y: Tensor = _MKLDNN._linear_pointwise(x, packed, bias, "none", [], "")
    return y[:1] if num_rows == 1 else y


def _packed_agrees(dtype: torch.dtype) -> bool:
    """Compare packed and plain on ragged shapes, with and without bias."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in ((40, 24), (40,), (3, 24))
    )
    packed = _pack(weight)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    return all(
        torch.allclose(_apply_packed(x, packed, b), functional.linear(x, weight, b), rtol=tolerance, atol=tolerance)
        for b in (None, bias)
    )


def _is_row_invariant(linear: PackedLinear) -> bool:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_MOST_PROBED_ROWS, linear.in_features, generator=generator).to(linear.dtype)
    y = linear(x)
    first = (torch.equal(linear(x[:n]), y[:n]) for n in _PROBED_ROWS)
    last = (torch.equal(linear(x[-n:]), y[-n:]) for n in _PROBED_ROWS if n <= _MOST_SHIFTED_ROWS)
    return all(first) and all(last)
