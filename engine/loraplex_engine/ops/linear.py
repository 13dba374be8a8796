"""The one seam through which every base linear goes.

`PackedLinear` owns the only copy of its weight. Row-invariant by decision; `probe_row_invariance` says whether this
machine keeps the promise.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import functional


class PackedLinear:
    """`y = x W^T + bias`, the weight held once in the form that is fastest here."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack a weight.

        Args:
            weight: [O, K]; the caller may let go of it afterwards.
            bias: [O] or None.
        """
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to rows.

        Args:
            x: [T, K].

        Returns:
            A new tensor [T, O].
        """
        return functional.linear(x, self._weight, self._bias)


def probe_row_invariance(linears: Iterable[PackedLinear]) -> bool:
    """Whether a row's result is the same bits for every number of rows beside it."""
    raise NotImplementedError
