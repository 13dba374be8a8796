"""Plots as SVG text to put into a page: lines, dots and intervals. Colours are the page's classes `s0`, `s1`, ..."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 44
_NUM_TICKS = 5
_ROW_HEIGHT = 30


@dataclass(frozen=True)
class Series:
    """Points with a name; `colour` counts from 0."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    is_dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """An interval with its middle, for one row."""

    name: str
    low: float
    middle: float
    high: float
    colour: int = 0


@dataclass(frozen=True)
class _Frame:
    """The plotted area: from values to places on the page."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float
    height: int = _HEIGHT

    def x(self, value: float) -> float:
        share = (value - self.low_x) / ((self.high_x - self.low_x) or 1.0)
        return round(_LEFT + min(max(share, 0.0), 1.0) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.low_y) / ((self.high_y - self.low_y) or 1.0)
        return round(self.height - _BOTTOM - min(max(share, 0.0), 1.0) * (self.height - _TOP - _BOTTOM), 1)


def draw_lines(
    title: str, x_label: str, y_label: str, series: Sequence[Series], *, mark_x: float | None = None, mark: str = ""
) -> str:
    """Return a plot of lines; a vertical one at `mark_x` where it is given."""
    frame = _fit(series)
    parts = _draw_axes(frame, x_label, y_label)
    if mark_x is not None:
        x = frame.x(mark_x)
        parts.append(f'<line class="mark" x1="{x}" y1="{_TOP}" x2="{x}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x - 4}" y="{_TOP + 12}" text-anchor="end">{escape(mark)}</text>')
    for one in series:
        places = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in one.points)
        dash = ' stroke-dasharray="6 4"' if one.is_dashed else ""
        parts.append(
            f'<polyline class="line s{one.colour}" points="{places}"{dash}><title>{escape(one.name)}</title></polyline>'
        )
    return _wrap(title, _draw_legend(series) + parts, _HEIGHT)


def draw_dots(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """Return a plot of points."""
    frame = _fit(series)
    parts = _draw_axes(frame, x_label, y_label)
    for one in series:
        dots = "".join(f'<circle cx="{frame.x(x)}" cy="{frame.y(y)}" r="2"/>' for x, y in one.points)
        parts.append(f'<g class="dots s{one.colour}">{dots}</g>')
    return _wrap(title, _draw_legend(series) + parts, _HEIGHT)


def draw_bars(title: str, x_label: str, bars: Sequence[Bar], centre: float, tolerance: float) -> str:
    """Return intervals below each other about `centre`; what lies within the tolerance is shaded."""
    reach = max([tolerance * 2, *(max(centre - bar.low, bar.high - centre) for bar in bars)])
    height = _TOP + _BOTTOM + _ROW_HEIGHT * len(bars)
    frame = _Frame(max(0.0, centre - reach * 1.05), centre + reach * 1.05, 0, 1, height)
    left, right = frame.x(centre / (1 + tolerance)), frame.x(centre * (1 + tolerance))
    depth = height - _TOP - _BOTTOM
    parts = [f'<rect class="band" x="{left}" y="{_TOP}" width="{right - left:.1f}" height="{depth}"/>']
    parts += _draw_x_axis(frame, x_label)
    for row, bar in enumerate(bars):
        y = _TOP + _ROW_HEIGHT * row + _ROW_HEIGHT / 2
        low, high = frame.x(bar.low), frame.x(bar.high)
        parts.append(f'<line class="line s{bar.colour}" x1="{low}" y1="{y}" x2="{high}" y2="{y}"/>')
        parts.append(f'<g class="dots s{bar.colour}"><circle cx="{frame.x(bar.middle)}" cy="{y}" r="5"/></g>')
        parts.append(f'<text x="4" y="{y - 8}">{escape(bar.name)}</text>')
    return _wrap(title, parts, height)


def find_ticks(low: float, high: float) -> list[float]:
    """Return round values between two, about five."""
    span = high - low
    if span <= 0:
        return [low]
    rough = span / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(count * step, 10) for count in range(first, math.floor(high / step + 1e-9) + 1)]


def _fit(series: Sequence[Series]) -> _Frame:
    xs = [x for one in series for x, _ in one.points] or [0.0, 1.0]
    ys = [y for one in series for _, y in one.points] or [0.0, 1.0]
    return _Frame(min(0.0, *xs), max(xs), min(0.0, *ys), max(ys) * 1.05)


def _draw_axes(frame: _Frame, x_label: str, y_label: str) -> list[str]:
    parts = _draw_x_axis(frame, x_label)
    for value in find_ticks(frame.low_y, frame.high_y):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    middle = (_TOP + frame.height - _BOTTOM) / 2
    parts.append(f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>')
    return parts


def _draw_x_axis(frame: _Frame, label: str) -> list[str]:
    foot, parts = frame.height - _BOTTOM, []
    for value in find_ticks(frame.low_x, frame.high_x):
        x = frame.x(value)
        parts.append(f'<line class="grid" x1="{x}" y1="{_TOP}" x2="{x}" y2="{foot}"/>')
        parts.append(f'<text x="{x}" y="{foot + 16}" text-anchor="middle">{value:g}</text>')
    centre = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{centre}" y="{foot + 34}" text-anchor="middle">{escape(label)}</text>')
    return parts


def _draw_legend(series: Sequence[Series]) -> list[str]:
    """Names above the plot, in the order of the lines."""
    parts, x = [], float(_LEFT)
    for one in series:
        dash = ' stroke-dasharray="6 4"' if one.is_dashed else ""
        parts.append(f'<line class="line s{one.colour}" x1="{x}" y1="16" x2="{x + 22}" y2="16"{dash}/>')
        parts.append(f'<text x="{x + 27}" y="20">{escape(one.name)}</text>')
        x += 44 + 6.6 * len(one.name)
    return parts


def _wrap(title: str, parts: Sequence[str], height: int) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {_WIDTH} {height}">{"".join(parts)}</svg></figure>'
    )
