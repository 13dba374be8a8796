"""The charts of the overview as data: of each number its name, figures in words and the points of the window. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from loraplex.dashboard.shown import NOTHING, show_count, show_percent, show_seconds, show_short
from loraplex.stats.report import StatsReport
from loraplex.wire.stats import EngineStats, Quantiles, StatsPoint, StatsRow

_QUANTILES = ("p50", "p95", "p99")
_Value = float | None
_Source = StatsRow | StatsPoint


class Line(msgspec.Struct, frozen=True):
    """One line of a chart."""

    label: str
    values: Sequence[_Value]


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """One number: `figures` are name and text, `unit` says how scripts write a value: s, ratio, count or rate."""

    id: str
    title: str
    hint: str
    unit: str
    figures: Sequence[tuple[str, str]]
    lines: Sequence[Line]


class Charts(msgspec.Struct, frozen=True):
    """All tiles over the same instants, in seconds of the epoch."""

    at: Sequence[float]
    tiles: Sequence[Tile]


class _Spread(msgspec.Struct, frozen=True):
    """A number with a spread: where it stands in a row and in a point."""

    id: str
    title: str
    hint: str
    unit: str
    show: Callable[[float | None], str]
    find: Callable[[_Source], Quantiles | None]


def _of_engines(name: str) -> Callable[[_Source], Quantiles | None]:
    def find(source: _Source) -> Quantiles | None:
        return None if source.engines is None else getattr(source.engines, name)

    return find


def _of_requests(name: str) -> Callable[[_Source], Quantiles | None]:
    return lambda source: getattr(source, name)


_GAUGES = (
    _Spread("kv", "KV cache use", "Of the engines' blocks", "ratio", show_percent,
            _of_engines("kv_usage")),
    _Spread("waiting", "Requests waiting", "In the engines' queues", "count", show_short, _of_engines("waiting")),
    _Spread("running", "Requests running", "In the engines' batches", "count", show_short, _of_engines("running")),
)  # fmt: skip
_TIMERS = (
    _Spread("queue", "Queue time", "From engine to first step", "s", show_seconds,
            _of_requests("queue_s")),
    _Spread("prefill", "Prefill time", "From first step to first token", "s", show_seconds,
            _of_requests("prefill_s")),
    _Spread("ttft", "Time to first token", "From gateway to first token", "s", show_seconds,
            _of_requests("time_to_first_token_s")),
    _Spread("itl", "Time between tokens", "Gaps within an answer", "s", show_seconds, _of_requests("inter_token_s")),
)  # fmt: skip
_WHOLE = _Spread("request", "Whole request", "From gateway to last token", "s", show_seconds,
                 _of_requests("request_s"))  # fmt: skip


def build_charts(report: StatsReport, *, has_engines: bool) -> Charts:
    """Return the eight numbers: four of engines and four times; without engines what a tenant may know instead."""
    # the last point has only begun: a part of it would look like a fall
    points = report.series[:-1] if len(report.series) > 1 else report.series
    spreads = [_build_spread(one, report.total, points) for one in (*(_GAUGES if has_engines else ()), *_TIMERS)]
    if has_engines:
        spreads.insert(len(_GAUGES), _build_preemptions(report, points))
    else:
        rates = [_build_rate(report, points, *one) for one in _RATES]
        spreads = [*rates, *spreads, _build_spread(_WHOLE, report.total, points)]
    return Charts([point.at.timestamp() for point in points], spreads)


_RATES = (
    ("requests", "Requests", "Ended, by the second", "requests"),
    ("tokens", "Tokens answered", "Sampled, by the second", "completion_tokens"),
    ("failed", "Requests failed", "Ended with an error, by the second", "requests_error"),
)


def _build_spread(spread: _Spread, total: StatsRow, points: Sequence[StatsPoint]) -> Tile:
    found = spread.find(total)
    figures = [(name, spread.show(_read(found, name))) for name in _QUANTILES]
    lines = [Line(name, [_read(spread.find(point), name) for point in points]) for name in _QUANTILES]
    return Tile(id=spread.id, title=spread.title, hint=spread.hint, unit=spread.unit, figures=figures, lines=lines)


def _read(found: Quantiles | None, name: str) -> _Value:
    """A quantile; None where there was nothing to measure."""
    if found is None or not found.count:
        return None
    value: float = getattr(found, name)
    return value


def _build_preemptions(report: StatsReport, points: Sequence[StatsPoint]) -> Tile:
    def count(engines: EngineStats | None) -> _Value:
        return None if engines is None else engines.preemptions * 60 / report.step_s

    total = report.total.engines
    minutes = (report.stop - report.start).total_seconds() / 60
    return Tile(
        id="preemptions",
        title="Preemptions",
        hint="Running requests sent back to wait",
        unit="count",
        figures=[
            ("in all", NOTHING if total is None else show_count(total.preemptions)),
            ("a minute", NOTHING if total is None else show_short(round(total.preemptions / minutes, 1))),
        ],
        lines=[Line("a minute", [count(point.engines) for point in points])],
    )


def _build_rate(
    report: StatsReport, points: Sequence[StatsPoint], key: str, title: str, hint: str, column: str
) -> Tile:
    total: int = getattr(report.total, column)
    seconds = (report.stop - report.start).total_seconds()
    values = [getattr(point, column) / report.step_s for point in points]
    return Tile(
        id=key,
        title=title,
        hint=hint,
        unit="rate",
        figures=[("in all", show_short(total)), ("a second", f"{total / seconds:.3g}")],
        lines=[Line("a second", values)],
    )
