"""How far the engine's logits are from the reference's, token by token of the vocabulary, in one pass over both."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


class Gain:
    """How much of what the adapter should change is changed: 1 as it should be, 0 nothing, 2 twice as much.

    The projection of the engine's change onto the reference's. Rounding points everywhere and hardly counts in it, so
    that a wrong scale or wrong matrices are found of an adapter that changes less than bfloat16 costs.
    """

    def __init__(self) -> None:
        self._along = 0.0
        self._squares = 0.0

    def add(self, plain: Array, reference: Array, other: Array) -> None:
        """Take in some tokens, [positions, n] each: without the adapter, with it, and what the engine says."""
        effect = reference.astype(np.float64) - plain
        error = np.nan_to_num(other, nan=0.0, posinf=0.0, neginf=0.0) - reference.astype(np.float64)
        self._along += float((error * effect).sum())
        self._squares += float(np.square(effect).sum())

    @property
    def value(self) -> float:
        """The gain; 1 for an adapter that changes nothing."""
        return 1.0 + self._along / self._squares if self._squares > 0 else 1.0


class Comparison:
    """Takes some tokens' logits of all positions after the other; holds a few numbers per position.

    KL(reference, other) = sum p (l - l') - log Z + log Z', summed with a running maximum of both.
    """

    def __init__(self, num_positions: int) -> None:
        self.is_finite = True
        """Whether every logit of the other was."""
        self._largest = np.zeros(num_positions)
        self._squares = 0.0
        self._num_logits = 0
        self._tops = np.full((2, num_positions), -np.inf)
        self._sums = np.zeros((2, num_positions))
        self._weighted = np.zeros(num_positions)

    def add(self, reference: Array, other: Array) -> None:
        """Compare some tokens, [positions, n] each."""
        if not np.isfinite(other).all():
            self.is_finite = False
            other = np.nan_to_num(other, nan=0.0, posinf=0.0, neginf=0.0)
        difference = reference.astype(np.float64) - other
        np.maximum(self._largest, np.abs(difference).max(1, initial=0.0), out=self._largest)
        self._squares += float(np.square(difference).sum())
        self._num_logits += difference.size
        tops = np.maximum(self._tops, [reference.max(1), other.max(1)])
        kept = np.exp(self._tops - tops)
        weights = np.exp(reference - tops[0][:, None])
        self._sums[0] = self._sums[0] * kept[0] + weights.sum(1)
        self._sums[1] = self._sums[1] * kept[1] + np.exp(other - tops[1][:, None]).sum(1)
        self._weighted = self._weighted * kept[0] + (weights * difference).sum(1)
        self._tops = tops

    @property
    def logit_difference(self) -> float:
        """Largest absolute difference of a logit."""
        return float(self._largest.max(initial=0.0))

    @property
    def rms(self) -> float:
        """Root of the mean square of all differences."""
        return math.sqrt(self._squares / max(1, self._num_logits))

    @property
    def max_kl(self) -> float:
        """Largest KL(reference, other) of a position, in nats."""
        return float(self._kls().max(initial=0.0))

    @property
    def mean_kl(self) -> float:
        """Mean KL(reference, other) over the positions, in nats."""
        return max(0.0, float(self._kls().mean()))

    def _kls(self) -> NDArray[np.float64]:
        """Of each position; rounding may take one a hair below zero."""
        log_z = self._tops + np.log(self._sums)
        return np.asarray(self._weighted / self._sums[0] - log_z[0] + log_z[1])
