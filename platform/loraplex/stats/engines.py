"""What engines said of themselves, of many pieces: `EngineMerge` makes one history of each and adds them up.

Every gateway samples every engine. Of each engine and piece one gateway is believed, the same one as far as it goes,
so that nothing is counted twice and what grew between two pieces is counted once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from loraplex.stats.piece import ENGINE_COUNTS, EnginePiece
from loraplex.stats.sketch import QUANTILES
from loraplex.wire.stats import EngineStats, Quantiles

_GAUGES = ("kv_usage", "waiting", "running", "slots", "slots_used")
_STALE_S = 3
"""A sample stands for so many seconds, unless another comes."""


class _History:
    """One engine's samples by second, NaN where there is none, and the growth of its counts by piece."""

    def __init__(self, base: str, num_seconds: int) -> None:
        self.base = base
        self.gauges = np.full((len(_GAUGES), num_seconds), np.nan)
        self.growth: dict[int, list[int]] = {}

    def add(self, offset: int, piece: EnginePiece) -> None:
        self.growth[offset] = piece.growth
        for second, sample in zip(piece.seconds, piece.samples, strict=True):
            if offset + second < self.gauges.shape[1]:
                self.gauges[:, offset + second] = [getattr(sample, name) for name in _GAUGES]


class EngineMerge:
    """Histories of engines over `num_seconds` from `start` on (seconds of the epoch)."""

    def __init__(self, start: int, num_seconds: int) -> None:
        self._start = start
        self._num_seconds = num_seconds
        self._heard: defaultdict[str, dict[int, dict[str, EnginePiece]]] = defaultdict(dict)
        self._histories: dict[str, _History] | None = None

    def add(self, gateway: str, began_at: int, pieces: Sequence[EnginePiece]) -> None:
        """Take in what one gateway heard from `began_at` on."""
        for piece in pieces:
            self._heard[piece.replica].setdefault(began_at - self._start, {})[gateway] = piece

    def list_replicas(self) -> list[tuple[str, str]]:
        """Return base and name of each engine."""
        return [(history.base, name) for name, history in self._build().items()]

    def summarize(
        self, is_meant: Callable[[str, str], bool], start: int = 0, stop: int | None = None
    ) -> EngineStats | None:
        """Return the numbers of engines from second `start` up to `stop`; None if none of them said anything.

        Args:
            is_meant: Whether an engine counts, by base and name.
            start: Seconds after the beginning.
            stop: Likewise, None: to the end.
        """
        stop = self._num_seconds if stop is None else stop
        meant = [history for name, history in self._build().items() if is_meant(history.base, name)]
        if not meant or start >= stop:
            return None
        gauges = np.stack([history.gauges for history in meant])[:, :, start:stop]
        if np.isnan(gauges).all():
            return None
        growth = Counter[str]()
        for history in meant:
            for offset, found in history.growth.items():
                if start <= offset < stop:
                    growth.update(dict(zip(ENGINE_COUNTS, found, strict=False)))
        return _describe(gauges, growth)

    def _build(self) -> dict[str, _History]:
        if self._histories is None:
            self._histories = {name: self._choose(heard) for name, heard in sorted(self._heard.items())}
        return self._histories

    def _choose(self, heard: dict[int, dict[str, EnginePiece]]) -> _History:
        """Believe whoever heard most, and where that one heard nothing, the next."""
        num_heard = Counter[str]()
        for pieces in heard.values():
            num_heard.update({gateway: len(piece.samples) for gateway, piece in pieces.items()})
        history: _History | None = None
        for offset, pieces in sorted(heard.items()):
            piece = pieces[max(pieces, key=lambda gateway: (num_heard[gateway], gateway))]
            if history is None:
                history = _History(piece.base, self._num_seconds)
            history.add(offset, piece)
        assert history is not None, "whoever is known was heard"
        return history


def _describe(gauges: NDArray[np.float64], growth: Counter[str]) -> EngineStats:
    """`gauges`: engine, gauge, second."""
    held = _hold(gauges)
    is_known = ~np.isnan(held).all(axis=(0, 1))
    # a second of which nobody said anything is no zero
    together = np.nansum(held, axis=0)[:, is_known]
    kv_usage, last_kv = gauges[:, 0], held[:, 0][:, is_known][:, -1]
    return EngineStats(
        replicas=int((~np.isnan(gauges).all(axis=(1, 2))).sum()),
        kv_usage=_spread(kv_usage[~np.isnan(kv_usage)]),
        waiting=_spread(together[1]),
        running=_spread(together[2]),
        kv_usage_now=float(np.nanmax(last_kv)),
        **{
            name: int(together[index, -1])
            for name, index in (("waiting_now", 1), ("running_now", 2), ("slots", 3), ("slots_used", 4))
        },
        **{name: growth[name] for name in ENGINE_COUNTS},
    )


def _hold(gauges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Let each sample stand for the seconds after it."""
    seconds = np.arange(gauges.shape[-1])
    last = np.maximum.accumulate(np.where(np.isnan(gauges), -_STALE_S - 1, seconds), axis=-1)
    held = np.take_along_axis(gauges, np.maximum(last, 0), axis=-1)
    return np.where(seconds - last <= _STALE_S, held, np.nan)


def _spread(values: NDArray[np.float64]) -> Quantiles:
    if not values.size:
        return Quantiles()
    ordered = np.sort(values)
    p50, p95, p99 = (float(ordered[max(1, math.ceil(q * ordered.size)) - 1]) for q in QUANTILES)
    return Quantiles(count=ordered.size, mean=float(ordered.mean()), p50=p50, p95=p95, p99=p99, max=float(ordered[-1]))
