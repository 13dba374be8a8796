"""The two vectors of expand's epilogue, `y = g * (y + s * acc) + c`, from what an adapter trained and the base has.

With W, b the base's weight and bias, b' the trained bias (b if none), d the LoRA layer's own bias (0 if none):
`g = m / ||W + s B A||` for each output row of DoRA, else 1, and `c = b' - g b + g s d`, so that the base's bias stays
outside the scaling by g. The norm is computed in closed form and float64; B A is never built.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Chunks = Iterable[tuple[slice, Array]]


def row_norms(base: Chunks, a: Array, b: Array, scaling: float) -> Array:
    """Norms of the rows of W + s B A.

    *Semantics* `||W + s B A||^2 = ||W||^2 + 2 s (W A^T) . B + s^2 B (A A^T) . B`, row by row.

    Args:
        base: W [O, K], some rows at a time, in order.
        a: [r, K].
        b: [O, r].
        scaling: s.

    Returns:
        [O].
    """
    gram = a @ a.T
    squares = [_squared_norms(_row_dot(rows, rows), rows @ a.T, b[span], gram, scaling) for span, rows in base]
    return np.sqrt(np.concatenate(squares))


def column_norms(base: Chunks, a: Array, b: Array, scaling: float) -> Array:
    """The same for W stored the other way round, as an embedding is: [K, O], some rows at a time."""
    own, cross = np.zeros(len(b)), np.zeros_like(b)
    for span, rows in base:
        own += _row_dot(rows.T, rows.T)
        cross += rows.T @ a[:, span].T
    return np.sqrt(_squared_norms(own, cross, b, a @ a.T, scaling))


def build_summand(
    factor: Array | None, bias: Array | None, trained: Array | None, lora_bias: Array | None, scaling: float
) -> Array | None:
    """The vector c [O]; None where there is no bias at all.

    Args:
        factor: g [O], or None for 1.
        bias: the base's, or None where it has none.
        trained: the bias that replaces the base's, or None.
        lora_bias: the LoRA layer's own, or None.
        scaling: s.
    """
    if bias is None and trained is None and lora_bias is None:
        return None
    g: Array | float = 1.0 if factor is None else factor
    own: Array | float = 0.0 if bias is None else bias
    c = (own if trained is None else trained) - g * own
    return np.asarray(c if lora_bias is None else c + g * scaling * lora_bias)


def _squared_norms(own: Array, cross: Array, b: Array, gram: Array, scaling: float) -> Array:
    squares = own + 2 * scaling * _row_dot(cross, b) + scaling**2 * _row_dot(b @ gram, b)
    # a row that cancels may come out a hair below zero
    return np.maximum(squares, 0.0)


def _row_dot(x: Array, y: Array) -> Array:
    product: Array = np.einsum("ij,ij->i", x, y)
    return product
