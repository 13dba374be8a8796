"""Quantiles of many values without the values: counts in buckets whose width is 2 % of where they lie.

A quantile is off by at most 1 % of itself, for values from a microsecond to ten million; sketches merge by adding
counts, and lose nothing by it. `Sketches` holds many side by side, by row, so that thousands merge in one pass.

Source: Masson, Rim, Lee: DDSketch, PVLDB 12 (2019).
"""

from __future__ import annotations

import math
from array import array

import msgspec
import numpy as np
from numpy.typing import NDArray

from loraplex.wire.stats import Quantiles

RELATIVE_ERROR = 0.01
_SMALLEST = 1e-6
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_NUM_BUCKETS = 1536
_MAX_FRESH = 8192
QUANTILES = (0.5, 0.95, 0.99)
# each stands for its bucket, whose ends are as far from it in relation; what is below the smallest is 0
_VALUES = _SMALLEST * 2 / (_GAMMA + 1) * _GAMMA ** np.arange(_NUM_BUCKETS)
_VALUES[0] = 0.0


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """The content of `Sketches` as bytes: cells (row and bucket) with their counts; of each row its sum and maximum."""

    cells: bytes
    counts: bytes
    sums: bytes
    peaks: bytes


class Sketches:
    """One sketch for each row from 0 on. Not for several threads at once."""

    def __init__(self) -> None:
        self._rows = array("q")
        self._values = array("d")
        self._cells: list[NDArray[np.int64]] = []
        self._counts: list[NDArray[np.int64]] = []
        self._sums = np.zeros(0)
        self._peaks = np.zeros(0)

    def add(self, row: int, value: float) -> None:
        """Count one value of a row; it is looked at later, with many others."""
        self._rows.append(row)
        self._values.append(value)
        if len(self._rows) >= _MAX_FRESH:
            self._fold()

    def merge(self, packed: Packed, rows: NDArray[np.int64]) -> None:
        """Add what another one held, whose row `i` is this one's row `rows[i]`; rows that go to -1 are left out."""
        sums, cells = np.frombuffer(packed.sums), np.frombuffer(packed.cells, np.int64)
        aims = rows[cells // _NUM_BUCKETS]
        kept = aims >= 0
        if not kept.any():
            return
        self._cells.append((aims * _NUM_BUCKETS + cells % _NUM_BUCKETS)[kept])
        self._counts.append(np.frombuffer(packed.counts, np.int64)[kept])
        rows = rows[: sums.size]
        kept = rows >= 0
        self._add_totals(rows[kept], sums[kept], np.frombuffer(packed.peaks)[kept])

    def pack(self) -> Packed:
        """Return all of it."""
        self._compact()
        return Packed(
            b"".join(part.tobytes() for part in self._cells),
            b"".join(part.tobytes() for part in self._counts),
            self._sums.tobytes(),
            self._peaks.tobytes(),
        )

    def summarize(self, num_rows: int) -> list[Quantiles]:
        """Return the quantiles of each row; `num_rows` are all that there are."""
        if self._rows:
            self._fold()
        self._grow(num_rows)
        if not self._cells:
            return [Quantiles()] * num_rows
        found = np.bincount(np.concatenate(self._cells), np.concatenate(self._counts), num_rows * _NUM_BUCKETS)
        # nearly all cells are empty
        cells = np.flatnonzero(found)
        totals = np.append(0, found[cells].cumsum())
        ends = totals[np.searchsorted(cells, np.arange(num_rows + 1) * _NUM_BUCKETS)]
        counts = np.diff(ends)
        means = self._sums / np.maximum(counts, 1)
        spread = [self._find(cells, totals, ends[:-1] + np.maximum(1, np.ceil(q * counts))) for q in QUANTILES]
        columns = (counts.astype(np.int64), means, *spread, self._peaks)
        return [
            Quantiles(count=count, mean=mean, p50=p50, p95=p95, p99=p99, max=peak) if count else Quantiles()
            for count, mean, p50, p95, p99, peak in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def _find(
        self, cells: NDArray[np.int64], totals: NDArray[np.float64], ranks: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Of each row the value that `ranks` values are no greater than, those of all rows before it included."""
        places = np.minimum(np.searchsorted(totals[1:], ranks), cells.size - 1)
        found: NDArray[np.float64] = np.minimum(_VALUES[cells[places] % _NUM_BUCKETS], self._peaks)
        return found

    def _fold(self) -> None:
        """Count the values that came lately."""
        rows, values = np.array(self._rows), np.array(self._values)
        del self._rows[:], self._values[:]
        buckets = np.ceil(np.log(np.maximum(values, _SMALLEST) / _SMALLEST) / math.log(_GAMMA)).astype(np.int64)
        cells, counts = np.unique(rows * _NUM_BUCKETS + np.minimum(buckets, _NUM_BUCKETS - 1), return_counts=True)
        self._cells.append(cells)
        self._counts.append(counts)
        self._add_totals(rows, values, values)

    def _add_totals(self, rows: NDArray[np.int64], sums: NDArray[np.float64], peaks: NDArray[np.float64]) -> None:
        self._grow(int(rows.max()) + 1)
        np.add.at(self._sums, rows, sums)
        np.maximum.at(self._peaks, rows, peaks)

    def _grow(self, num_rows: int) -> None:
        missing = num_rows - self._sums.size
        if missing > 0:
            self._sums, self._peaks = (np.append(found, np.zeros(missing)) for found in (self._sums, self._peaks))

    def _compact(self) -> None:
        """Make one count of each cell."""
        if self._rows:
            self._fold()
        if len(self._cells) < 2:
            return
        cells, places = np.unique(np.concatenate(self._cells), return_inverse=True)
        counts = np.zeros(cells.size, np.int64)
        np.add.at(counts, places, np.concatenate(self._counts))
        self._cells, self._counts = [cells], [counts]
