"""The one seam through which every base linear goes, and `plain_linear` for what adapters put in the place of one.

`PackedLinear` owns the only copy of its weight, laid out for the form that is fastest here: our own product where the
CPU has the instructions for it, else oneDNN's where a probe proves that the private torch ops for it work, else the
weight as it is. `probe_row_invariance` says whether this machine keeps the promise that a row's bits do not depend on
its company.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from loraplex_engine.ops.dispatch import kernels_for
from loraplex_engine.ops.native.build import native_status

# NOTE: one layout must serve every number of rows. A hint of 1 gives float32 a layout for matrix-vector products, with
# which 2 to 128 rows took up to twice as long (Zen 4, 576 x 3072); hints of 16, 128, 512 and none gave the same times.
_LAYOUT_ROWS = 16

_MOST_SHIFTED_ROWS = 65

_MKLDNN: Any = torch.ops.mkldnn
_OPS: Any = torch.ops.loraplex


@dataclass(frozen=True)
class LinearForm:
    """One way to hold a weight [O, K] and to multiply by it."""

    name: str
    """`own`, `onednn` or `plain`."""
    pack: Callable[[Tensor], Tensor]
    """The weight as this form wants it."""
    apply: Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
    """x [T, K], what `pack` gave, bias [O] or None, and O to a new tensor [T, O]."""
    probed_rows: tuple[int, ...]
    """Numbers of rows that may take different ways through it; the largest last."""


# NOTE: our own ops are there only once they are built, so these names are looked up when called


def _pack_own(weight: Tensor) -> Tensor:
    packed: Tensor = _OPS.pack_linear.default(weight)
    return packed


def _apply_own(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    y: Tensor = _OPS.packed_linear.default(x, packed, bias, out_features)
    return y


def _pack_onednn(weight: Tensor) -> Tensor:
    packed: Tensor = _MKLDNN._reorder_linear_weight(weight, _LAYOUT_ROWS)
    return packed


def _apply_onednn(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    num_rows = x.shape[0]
    if num_rows == 0:
        return x.new_empty(0, out_features)
    if num_rows == 1:
        # one row alone takes another kernel, with other bits
        x = x.repeat(2, 1)
    y: Tensor = _MKLDNN._linear_pointwise(x, packed, bias, "none", [], "")
    return y[:1] if num_rows == 1 else y


def _pack_plain(weight: Tensor) -> Tensor:
    return weight


def _apply_plain(x: Tensor, weight: Tensor, bias: Tensor | None, _: int) -> Tensor:
    return functional.linear(x, weight, bias)


# tiles of 1 to 8 rows (of matrix tiles: 1 to 16, and two halves of them), several of them, and more than one block
_OWN_WAYS = (*range(1, 19), 31, 32, 33, 129)
_UNKNOWN_WAYS = (*range(1, 18), *range(31, 34), *range(63, 66), *range(127, 130), 512)

OWN = LinearForm("own", _pack_own, _apply_own, _OWN_WAYS)
ONEDNN = LinearForm("onednn", _pack_onednn, _apply_onednn, _UNKNOWN_WAYS)
PLAIN = LinearForm("plain", _pack_plain, _apply_plain, _UNKNOWN_WAYS)


class PackedLinear:
    """`y = x W^T + bias`, the weight held once in the form that is fastest here."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, form: LinearForm | None = None) -> None:
        """Pack a weight.

        Args:
            weight: [O, K] contiguous; only the plain form keeps a reference to it.
            bias: [O] or None.
            form: another one than this machine's fastest.
        """
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.form = form or fastest_form(weight.device.type, weight.dtype)
        self.packed = self.form.pack(weight.detach())
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to rows.

        Args:
            x: [T, K] contiguous, in the weight's dtype.

        Returns:
            A new tensor [T, O].
        """
        return self.form.apply(x, self.packed, self.bias, self.out_features)


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
def fastest_form(device_type: str, dtype: torch.dtype) -> LinearForm:
    """The form that serves weights of a device type and dtype; LORAPLEX_NATIVE=0 leaves the plain one."""
    if device_type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return PLAIN
    if native_status().form == "native" and _OPS.packs_linear(dtype):
        return OWN
    return ONEDNN if has_onednn(dtype) else PLAIN


def has_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed linear works here for float32 or bfloat16; never with LORAPLEX_NATIVE=0."""
    if os.environ.get("LORAPLEX_NATIVE", "1") == "0":
        return False
    try:
        return _agrees_with_plain(ONEDNN, dtype)
    except (AttributeError, RuntimeError, TypeError):
        # the ops are private: absent, or with other arguments, in another build
        return False


def probe_row_invariance(linears: Iterable[PackedLinear]) -> bool:
    """Whether a row's result is the same bits for every number of rows beside it.

    Every different (K, O, dtype) is tried with the numbers of rows that its form names; up to 65, at another place of
    the batch too.

    Args:
        linears: the linears of the base model, the head among them.
    """
    different = {(linear.in_features, linear.out_features, linear.dtype): linear for linear in linears}
    return all(_is_row_invariant(linear) for linear in different.values())


def _agrees_with_plain(form: LinearForm, dtype: torch.dtype) -> bool:
    """Compare on ragged shapes, with and without bias."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in ((40, 24), (40,), (3, 24))
    )
    packed = form.pack(weight)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    return all(
        torch.allclose(form.apply(x, packed, b, 40), functional.linear(x, weight, b), rtol=tolerance, atol=tolerance)
        for b in (None, bias)
    )


def _is_row_invariant(linear: PackedLinear) -> bool:
    generator = torch.Generator().manual_seed(1)
    probed = linear.form.probed_rows
    x = torch.randn(probed[-1], linear.in_features, generator=generator).to(linear.dtype)
    y = linear(x)
    first = (torch.equal(linear(x[:n]), y[:n]) for n in probed)
    last = (torch.equal(linear(x[-n:]), y[-n:]) for n in probed if n <= _MOST_SHIFTED_ROWS)
    return all(first) and all(last)
