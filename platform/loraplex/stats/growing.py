"""A piece that is not over: `GrowingPiece` takes what is seen, and whole pieces, until it is frozen."""

from __future__ import annotations

import msgspec
import numpy as np

from loraplex.stats.piece import COUNTS, ENGINE_COUNTS, OTHER, SPREADS, EnginePiece, Key, Piece
from loraplex.stats.sketch import Sketches

MAX_KEYS = 2000
"""In one piece; what is beyond is counted as `other`, with its base and replica."""


class GrowingPiece:
    """What was seen since `began_at`, in seconds of the epoch. Not for several threads at once."""

    def __init__(self, began_at: int) -> None:
        self.began_at = began_at
        self.counts: list[list[int]] = []
        """For each row those of `COUNTS`."""
        self.spreads = [Sketches() for _ in SPREADS]
        self._key_to_row: dict[Key, int] = {}
        self._engines: dict[str, EnginePiece] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was seen."""
        return not self._key_to_row and not self._engines

    def find_row(self, key: Key) -> int:
        """Return the row of a key, that of the rest if there is no room for another."""
        row = self._key_to_row.get(key)
        if row is not None:
            return row
        if len(self.counts) >= MAX_KEYS and key.tenant != OTHER:
            return self.find_row(Key(key.base, None, OTHER, OTHER, key.replica))
        self.counts.append([0] * len(COUNTS))
        row = self._key_to_row[key] = len(self.counts) - 1
        return row

    def find_engine(self, replica: str, base: str) -> EnginePiece:
        """Return what was heard of an engine, to add to."""
        found = self._engines.get(replica)
        if found is None:
            found = self._engines[replica] = EnginePiece(replica, base, [], [], [0] * len(ENGINE_COUNTS))
        return found

    def add(self, piece: Piece, offset_s: int) -> None:
        """Add a piece that began `offset_s` seconds later."""
        rows = np.array([self.find_row(key) for key in piece.keys], np.int64)
        for row, found in zip(rows, np.frombuffer(piece.counts, np.int64).reshape(-1, len(COUNTS)), strict=True):
            self.counts[row] = (found + self.counts[row]).tolist()
        for sketches, packed in zip(self.spreads, piece.spreads, strict=True):
            sketches.merge(packed, rows)
        for one in piece.engines:
            engine = self.find_engine(one.replica, one.base)
            engine.seconds += [second + offset_s for second in one.seconds]
            engine.samples += one.samples
            engine.growth = [before + more for before, more in zip(engine.growth, one.growth, strict=True)]

    def freeze(self) -> Piece:
        """Return what there is so far."""
        return Piece(
            list(self._key_to_row),
            np.array(self.counts, np.int64).tobytes(),
            [sketches.pack() for sketches in self.spreads],
            [
                msgspec.structs.replace(one, seconds=[*one.seconds], samples=[*one.samples], growth=[*one.growth])
                for one in self._engines.values()
            ],
        )
