"""How often each adapter was asked for lately: counts that halve every minute. Only `Traffic` writes them.

Knows bases and digests, not replicas. Bounded: the rarest are forgotten.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

HALF_LIFE_S = 60.0
MIN_COUNT = 0.25
"""What is below is forgotten; one request is remembered for two minutes, a hundred for almost nine."""
_MIN_TO_SHARE = 8.0
_MAX_KNOWN = 8192
_Key = tuple[str, str | None]


class Demand(msgspec.Struct, frozen=True):
    """An adapter that was asked for: its rank, the count, and the weights that it is bound to, None for any."""

    digest: str
    rank: int
    count: float
    weights: str | None = None


class Traffic:
    """Decayed counts of requests, by base and digest; a digest of None is the base itself."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[_Key, tuple[float, float]] = {}
        self._needs: dict[_Key, tuple[int, str | None]] = {}
        self._totals: dict[str, tuple[float, float]] = {}

    def note(
        self, base: str, digest: str | None, rank: int = 0, *, weights: str | None = None, times: float = 1.0
    ) -> None:
        """Count a request, or so many."""
        now, key = self._clock(), (base, digest)
        self._counts[key] = (_decay(self._counts.get(key), now) + times, now)
        self._totals[base] = (_decay(self._totals.get(base), now) + times, now)
        self._needs[key] = rank, weights
        if len(self._counts) > _MAX_KNOWN:
            self._forget(now)

    def share(self, base: str, digest: str | None) -> float:
        """Return the part of a base's requests that asked for `digest`; 0 while there are too few to say."""
        now = self._clock()
        total = _decay(self._totals.get(base), now)
        return _decay(self._counts.get((base, digest)), now) / total if total >= _MIN_TO_SHARE else 0.0

    def demands(self, base: str) -> list[Demand]:
        """Return the adapters of a base that were asked for lately, the most wanted first."""
        now = self._clock()
        found = [
            Demand(digest, self._needs[base, digest][0], count, self._needs[base, digest][1])
            for (known, digest), entry in self._counts.items()
            if known == base and digest is not None and (count := _decay(entry, now)) >= MIN_COUNT
        ]
        return sorted(found, key=lambda demand: (-demand.count, demand.digest))

    def _forget(self, now: float) -> None:
        """Keep the more frequent half of what is known."""
        kept = sorted(self._counts, key=lambda key: _decay(self._counts[key], now), reverse=True)[: _MAX_KNOWN // 2]
        self._counts = {key: self._counts[key] for key in kept}
        self._needs = {key: self._needs[key] for key in kept}


def _decay(entry: tuple[float, float] | None, now: float) -> float:
    if entry is None:
        return 0.0
    count, at = entry
    return count * math.pow(0.5, (now - at) / HALF_LIFE_S)
