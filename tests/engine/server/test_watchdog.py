"""Silence of the core, counted; and which adapters the next one is asked for."""

from __future__ import annotations

from itertools import count

from loraplex_engine.server.resident import Residents
from loraplex_engine.server.watchdog import Watchdog


def ticks_until_stuck(watchdog: Watchdog) -> int:
    return next(number for number in count(1) if watchdog.tick())


def test_a_core_is_stuck_once_it_has_been_silent_for_longer_than_the_timeout() -> None:
    assert ticks_until_stuck(Watchdog(60, 1)) == 61


def test_a_word_starts_the_count_anew() -> None:
    watchdog = Watchdog(10, 1)
    for _ in range(30):
        assert not any(watchdog.tick() for _ in range(10))
        watchdog.hear()
    assert ticks_until_stuck(watchdog) == 11


def test_a_core_that_compiles_gets_more_patience_until_its_next_word() -> None:
    watchdog = Watchdog(10, 1)
    watchdog.hear(600)
    assert not any(watchdog.tick() for _ in range(600))
    watchdog.hear()
    assert ticks_until_stuck(watchdog) == 11


def test_less_patience_than_usual_is_not_asked_for() -> None:
    watchdog = Watchdog(10, 1)
    watchdog.hear(1)
    assert ticks_until_stuck(watchdog) == 11


def test_pinned_adapters_come_back_first_and_the_latest_of_the_others() -> None:
    residents = Residents()
    for digest in "abcd":
        residents.note(digest, pin=digest == "b")
    residents.note("a")
    residents.trim(2)
    assert residents.take() == [("b", True), ("a", False), ("d", False)]


def test_an_adapter_is_handed_out_once() -> None:
    residents = Residents()
    residents.note("a")
    assert residents.take() == [("a", False)]
    assert residents.take() == []


def test_use_does_not_unpin_and_a_load_without_pin_does() -> None:
    residents = Residents()
    residents.note("a", pin=True)
    residents.note("a")
    assert residents.take() == [("a", True)]
    residents.note("a", pin=True)
    residents.note("a", pin=False)
    assert residents.take() == [("a", False)]


def test_a_dropped_adapter_does_not_come_back() -> None:
    residents = Residents()
    residents.note("a", pin=True)
    residents.forget("a")
    residents.forget("unknown")
    assert residents.take() == []
