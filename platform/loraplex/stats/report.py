"""The numbers that operators steer by, of the last minute, ten minutes or hour: `read_stats` merges the pieces.

Reads `stats_piece`, writes nothing. Quantiles are of all gateways' values together, never means of quantiles.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import stats_piece
from loraplex.stats.engines import EngineMerge
from loraplex.stats.piece import MINUTE_S, PIECE_S, Key, Piece, decode_piece, find_minute
from loraplex.stats.tally import Tally
from loraplex.wire.stats import EngineStats, StatsPoint, StatsRow

By = Literal["base", "tenant", "adapter", "replica"]
BYS: tuple[By, ...] = ("base", "tenant", "adapter", "replica")
WINDOW_TO_SECONDS = {"1m": 60, "10m": 600, "1h": 3600}
_MAX_POINTS = 60
_OF_ENGINES: tuple[By, ...] = ("base", "replica")


class StatsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests and engines to read of, and how to group them.

    Args:
        window_s: Seconds back from now.
        by: What each row is of.
        tenant_id: One tenant's requests and no engines, as a tenant's key may see them; None: all.
        base: Only those of one base; `adapter` and `replica` likewise.
        has_series: Whether the report tells how the window went.
        has_spreads: Whether it tells times and lengths; counts alone are read faster.
    """

    window_s: int = 600
    by: By = "base"
    tenant_id: str | None = None
    base: str | None = None
    adapter: str | None = None
    replica: str | None = None
    has_series: bool = False
    has_spreads: bool = True


class StatsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The window [start, stop): a row each, those with most requests first; all of it; points of `step_s` seconds.

    The last point is not over yet.
    """

    start: datetime
    stop: datetime
    by: By
    rows: list[StatsRow]
    total: StatsRow
    step_s: int
    series: list[StatsPoint]


class FreshPiece(msgspec.Struct, frozen=True):
    """A piece of a gateway that may not be written yet, of `span_s` from `began_at` on, in seconds of the epoch."""

    gateway: str
    span_s: int
    began_at: int
    piece: Piece


async def read_stats(
    database: Database, query: StatsQuery, fresh: Sequence[FreshPiece] = (), *, now: float | None = None
) -> StatsReport:
    """Return the numbers of a window; what other gateways saw in the last ten seconds may be missing.

    Args:
        database: Has the pieces of all gateways.
        query: What to read.
        fresh: What the asking gateway has not written yet (`StatsRecorder.fresh`).
        now: Seconds of the epoch, for tests.

    Raises:
        UnavailableError: The database does not answer.
    """
    span = _Span(query.window_s, time.time() if now is None else now)
    async with database.report() as connection:
        rows = (await connection.execute(_select(span))).all()
    written = [(row.gateway, row.span_s, int(row.began_at.timestamp()), row.content) for row in rows]
    return await asyncio.to_thread(_merge, query, span, written, fresh)


def _select(span: _Span) -> sa.Select[Any]:
    """Minutes where steps are no shorter; of what is in none of them (yet, or after a crash) the shorter pieces."""
    piece, minute = stats_piece.alias("piece"), stats_piece.alias("minute")
    chosen = piece.c.span_s == PIECE_S
    if span.step_s >= MINUTE_S:
        is_in_one = sa.exists().where(
            minute.c.gateway == piece.c.gateway, minute.c.span_s == MINUTE_S, minute.c.began_at == piece.c.minute
        )
        chosen = sa.or_(piece.c.span_s == MINUTE_S, ~is_in_one)
    return sa.select(piece).where(piece.c.began_at >= _instant(span.start), chosen)


class _Span:
    """The window, in whole steps and the one that is not over."""

    def __init__(self, window_s: int, now: float) -> None:
        self.step_s = max(PIECE_S, window_s // _MAX_POINTS)
        self.start = int(now // self.step_s) * self.step_s - window_s
        self.stop = now
        self.num_points = window_s // self.step_s + 1

    def has(self, at: int) -> bool:
        return self.start <= at <= self.stop

    def find_point(self, at: int) -> int:
        return (at - self.start) // self.step_s


class _Groups:
    """Which row of the report a key belongs to."""

    def __init__(self, by: By) -> None:
        self._by = by
        self.labels: list[dict[str, Any]] = []
        self._found: dict[tuple[str | None, ...], int] = {}

    def find(self, key: Key) -> int:
        """Return the row of a key, a new one if it is the first there."""
        ids, label = self._describe(key)
        row = self._found.setdefault(ids, len(self.labels))
        if row == len(self.labels):
            self.labels.append(label)
        return row

    def _describe(self, key: Key) -> tuple[tuple[str | None, ...], dict[str, Any]]:
        if self._by == "base":
            return (key.base,), {"base": key.base}
        if self._by == "replica":
            return (key.base, key.replica), {"base": key.base, "replica": key.replica}
        if self._by == "tenant":
            return (key.tenant_id, key.tenant), {"tenant": key.tenant}
        label = {"base": key.base, "tenant": key.tenant, "adapter": key.adapter}
        return (key.base, key.tenant_id, key.tenant, key.adapter), label


def _merge(
    query: StatsQuery, span: _Span, written: Sequence[tuple[str, int, int, bytes]], fresh: Sequence[FreshPiece]
) -> StatsReport:
    groups = _Groups(query.by)
    by_row, by_point, total = (Tally(has_spreads=query.has_spreads) for _ in range(3))
    engines = EngineMerge(span.start, int(span.stop) - span.start + 1)
    for gateway, began_at, piece in _read_pieces(written, fresh):
        if not span.has(began_at):
            continue
        kept = [_is_asked(query, key) for key in piece.keys]
        by_row.add(piece, [groups.find(key) if is_kept else -1 for key, is_kept in zip(piece.keys, kept, strict=True)])
        total.add(piece, [0 if is_kept else -1 for is_kept in kept])
        if query.has_series:
            by_point.add(piece, [span.find_point(began_at) if is_kept else -1 for is_kept in kept])
        if query.tenant_id is None and query.adapter is None:
            engines.add(gateway, began_at, [one for one in piece.engines if _is_of(query, one.base, one.replica)])
    return _build_report(query, span, groups, (by_row, by_point, total), engines)


def _read_pieces(
    written: Sequence[tuple[str, int, int, bytes]], fresh: Sequence[FreshPiece]
) -> Iterator[tuple[str, int, Piece]]:
    """Each piece once; what was written while we asked is fresh no more."""
    known = {row[:3] for row in written}
    for gateway, _, began_at, content in written:
        piece = decode_piece(content)
        if piece is not None:
            yield gateway, began_at, piece
    for one in fresh:
        in_minute = (one.gateway, MINUTE_S, find_minute(one.began_at))
        if (one.gateway, one.span_s, one.began_at) not in known and in_minute not in known:
            yield one.gateway, one.began_at, one.piece


def _is_asked(query: StatsQuery, key: Key) -> bool:
    if query.tenant_id not in (None, key.tenant_id) or query.adapter not in (None, key.adapter):
        return False
    return _is_of(query, key.base, key.replica)


def _is_of(query: StatsQuery, base: str, replica: str) -> bool:
    return query.base in (None, base) and query.replica in (None, replica)


def _build_report(
    query: StatsQuery, span: _Span, groups: _Groups, tallies: tuple[Tally, Tally, Tally], engines: EngineMerge
) -> StatsReport:
    by_row, by_point, total = tallies
    if query.by in _OF_ENGINES:
        # also those that nobody asked anything of
        for base, replica in engines.list_replicas():
            groups.find(Key(base, None, "", None, replica))
    rows = [
        StatsRow(**label, **found, engines=_find_engines(query.by, label, engines))
        for label, found in zip(groups.labels, by_row.summarize(len(groups.labels)), strict=True)
    ]
    rows.sort(key=_order)
    series = _build_series(span, by_point, engines) if query.has_series else []
    return StatsReport(
        start=_instant(span.start),
        stop=_instant(span.stop),
        by=query.by,
        rows=rows,
        total=StatsRow(**total.summarize(1)[0], engines=engines.summarize(lambda _base, _replica: True)),
        step_s=span.step_s,
        series=series,
    )


def _order(row: StatsRow) -> tuple[int | str, ...]:
    return (-row.requests, row.base or "", row.tenant or "", row.adapter or "", row.replica or "")


def _find_engines(by: By, label: dict[str, Any], engines: EngineMerge) -> EngineStats | None:
    if by not in _OF_ENGINES:
        return None
    return engines.summarize(lambda base, replica: base == label["base"] and label.get("replica") in (None, replica))


def _build_series(span: _Span, by_point: Tally, engines: EngineMerge) -> list[StatsPoint]:
    return [
        StatsPoint(
            at=_instant(span.start + index * span.step_s),
            engines=engines.summarize(lambda _base, _replica: True, index * span.step_s, (index + 1) * span.step_s),
            **found,
        )
        for index, found in enumerate(by_point.summarize(span.num_points))
    ]


def _instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
