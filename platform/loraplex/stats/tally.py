"""Requests of many pieces by some grouping: `Tally` adds counts and merges sketches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loraplex.stats.piece import COUNTS, SPREADS, Piece
from loraplex.stats.sketch import Sketches


class Tally:
    """Sums by row, and quantiles where they are asked for."""

    def __init__(self, *, has_spreads: bool = True) -> None:
        self._counts = np.zeros((0, len(COUNTS)), np.int64)
        self._spreads = [Sketches() for _ in SPREADS] if has_spreads else []

    def add(self, piece: Piece, rows: Sequence[int]) -> None:
        """Add a piece whose key `i` is of row `rows[i]`, or of none if that is -1."""
        aims = np.array(rows, np.int64)
        kept = aims >= 0
        if not kept.any():
            return
        counts = np.frombuffer(piece.counts, np.int64).reshape(-1, len(COUNTS))
        self._grow(int(aims.max()) + 1)
        np.add.at(self._counts, aims[kept], counts[kept])
        # all of them, or none
        for sketches, packed in zip(self._spreads, piece.spreads, strict=False):
            sketches.merge(packed, aims)

    def summarize(self, num_rows: int) -> list[dict[str, Any]]:
        """Return what is known of each row, by the names in `COUNTS` and `SPREADS`."""
        self._grow(num_rows)
        spreads = [sketches.summarize(num_rows) for sketches in self._spreads]
        return [
            dict(zip(COUNTS, self._counts[row].tolist(), strict=True))
            | {name: found[row] for name, found in zip(SPREADS, spreads, strict=False)}
            for row in range(num_rows)
        ]

    def _grow(self, num_rows: int) -> None:
        missing = num_rows - len(self._counts)
        if missing > 0:
            self._counts = np.vstack([self._counts, np.zeros((missing, len(COUNTS)), np.int64)])
