"""How figures are shown: filters of the templates. Pure; None is a dash everywhere, for what is not known."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

NOTHING = "\N{EN DASH}"
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SHORT_DIGEST = len("sha256:") + 12
_THOUSANDS = ("", "k", "M", "G", "T")


def show_count(value: float | None) -> str:
    """A count in full: `12,345`."""
    return NOTHING if value is None else f"{value:,.0f}"


def show_short(value: float | None) -> str:
    """A count in three digits: `12.3k`."""
    if value is None:
        return NOTHING
    value = _round(value)
    if abs(value) < 1000:
        return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"
    power = min(int(math.log10(abs(value)) / 3 + 1e-9), len(_THOUSANDS) - 1)
    return f"{_three(value / 1000**power)}{_THOUSANDS[power]}"


def show_bytes(value: float | None) -> str:
    """Bytes in the binary unit that fits: `26.0 MiB`."""
    if value is None:
        return NOTHING
    size, unit = float(value), 0
    while abs(size) >= 1024 and unit < len(_BYTES) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_BYTES[unit]}" if unit == 0 else f"{size:,.1f} {_BYTES[unit]}"


def show_seconds(value: float | None) -> str:
    """A duration in the unit that fits: `4.2 ms`, `1.25 s`, `3 min 20 s`."""
    if value is None:
        return NOTHING
    rounded = _round(value)
    if rounded < 1:
        return f"{_three(rounded * 1000)} ms"
    if rounded < 60:
        return f"{_three(rounded)} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next(index for index, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount)


def show_percent(ratio: float | None) -> str:
    """A part of one: `42.5 %`."""
    return NOTHING if ratio is None else f"{ratio * 100:.1f} %"


def show_times(count: int | None) -> str:
    """How often: `once`, `12 times`."""
    if count is None:
        return NOTHING
    return "once" if count == 1 else f"{show_count(count)} times"


def show_instant(value: datetime | str | None) -> str:
    """An instant in UTC to the second: `2026-12-31 23:59:59`."""
    found = _read_instant(value)
    return NOTHING if found is None else found.strftime("%Y-%m-%d %H:%M:%S")


def show_machine_time(value: datetime | str | None) -> str:
    """An instant for machines, as RFC 3339."""
    found = _read_instant(value)
    return "" if found is None else found.isoformat(timespec="seconds").replace("+00:00", "Z")


def shorten_digest(digest: str | None) -> str:
    """The beginning of a digest, enough to call it by."""
    return NOTHING if digest is None else digest[:_SHORT_DIGEST]


def show_or_dash(value: Any) -> Any:
    """A text, or the dash."""
    return NOTHING if value is None or value == "" else value


def _round(value: float) -> float:
    """To the three digits that are shown, so that a unit is never a thousand of the one below."""
    return float(f"{value:.3g}")


def _three(value: float) -> str:
    """Three digits, and never a power of ten."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))
    return f"{value:.{min(digits, 3)}f}"


def _read_instant(value: datetime | str | None) -> datetime | None:
    if value is None or isinstance(value, datetime):
        return None if value is None else value.astimezone(UTC)
    return datetime.fromisoformat(value).astimezone(UTC)


FILTERS: dict[str, Callable[..., Any]] = {
    "count": show_count,
    "short": show_short,
    "size": show_bytes,
    "seconds": show_seconds,
    "percent": show_percent,
    "times": show_times,
    "instant": show_instant,
    "machine_time": show_machine_time,
    "digest": shorten_digest,
    "dash": show_or_dash,
}
"""By the names that templates use."""
