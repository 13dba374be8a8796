"""How figures are written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from loraplex.dashboard import shown

DASH = "\N{EN DASH}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ms"),
        (0.0042, "4.20 ms"),
        (0.0999, "99.9 ms"),
        (0.5, "500 ms"),
        (1.254, "1.25 s"),
        (0.99999, "1.00 s"),
        (59.96, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (90_061, "1 d 1 h"),
        (None, DASH),
    ],
)
def test_seconds_have_the_unit_that_fits(value: float | None, text: str) -> None:
    assert shown.show_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12, "12"),
        (0.25, "0.25"),
        (999, "999"),
        (1000, "1.00k"),
        (12_345, "12.3k"),
        (999_999, "1.00M"),
        (-4200, "-4.20k"),
        (8.9, "8.9"),
        (None, DASH),
    ],
)
def test_counts_have_three_digits(value: float | None, text: str) -> None:
    assert shown.show_short(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (27_262_976, "26.0 MiB"), (598 << 30, "598.0 GiB"), (None, DASH)],
)
def test_bytes_have_binary_units(value: float | None, text: str) -> None:
    assert shown.show_bytes(value) == text


def test_instants_are_utc() -> None:
    at = datetime(2026, 1, 1, 1, 30, tzinfo=timezone(timedelta(hours=2)))
    assert shown.show_instant(at) == "2025-12-31 23:30:00"
    assert shown.show_instant("2026-01-01T00:00:00.5Z") == "2026-01-01 00:00:00"
    assert shown.show_machine_time(datetime(2026, 1, 1, tzinfo=UTC)) == "2026-01-01T00:00:00Z"
    assert shown.show_instant(None) == DASH


@pytest.mark.parametrize(("count", "text"), [(0, "0 times"), (1, "once"), (1234, "1,234 times")])
def test_how_often_is_said_in_words(count: int, text: str) -> None:
    assert shown.show_times(count) == text


def test_what_is_not_known_is_a_dash_everywhere() -> None:
    assert {shown.FILTERS[name](None) for name in shown.FILTERS if name != "machine_time"} == {DASH}
