"""Trust in replicas: out at once when they break, after some errors of their own, back by one good trial."""

from __future__ import annotations

import pytest

from loraplex.fleet.health import FIRST_EJECTION_S, LONGEST_EJECTION_S, MAX_IN_A_ROW, TRIAL_S, Health

A, B = "http://a", "http://b"


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(clock)


def test_a_replica_that_breaks_is_out_for_a_moment(health: Health, clock: Clock) -> None:
    health.note_broken(A)
    assert health.find_ejected() == {A}
    clock.now += FIRST_EJECTION_S
    assert health.find_ejected() == frozenset()


def test_on_trial_it_gets_one_request_and_a_good_answer_brings_it_back(health: Health, clock: Clock) -> None:
    health.note_broken(A)
    clock.now += FIRST_EJECTION_S
    health.begin(A)
    assert health.find_ejected() == {A}
    health.note_good(A)
    assert health.find_ejected() == frozenset()
    health.begin(A)
    assert health.find_ejected() == frozenset()


def test_a_failed_trial_doubles_the_time_up_to_a_bound(health: Health, clock: Clock) -> None:
    health.note_broken(A)
    expected = FIRST_EJECTION_S
    for _ in range(8):
        clock.now += expected - 0.01
        assert health.find_ejected() == {A}
        clock.now += 0.01
        assert health.find_ejected() == frozenset()
        health.begin(A)
        health.note_fault(A)
        expected = min(2 * expected, LONGEST_EJECTION_S)
    assert expected == LONGEST_EJECTION_S


def test_a_trial_without_an_answer_is_followed_by_another(health: Health, clock: Clock) -> None:
    health.note_broken(A)
    clock.now += FIRST_EJECTION_S
    health.begin(A, 2.0)
    clock.now += 1.9
    assert health.find_ejected() == {A}
    health.begin(A)
    clock.now += TRIAL_S
    assert health.find_ejected() == {A}
    clock.now += 0.1
    assert health.find_ejected() == frozenset()


def test_a_request_that_was_there_before_is_no_trial(health: Health, clock: Clock) -> None:
    health.note_broken(A)
    health.begin(A)
    health.note_good(A)
    assert health.find_ejected() == {A}
    clock.now += FIRST_EJECTION_S
    health.note_good(A)
    health.begin(A)
    assert health.find_ejected() == {A}


def test_sixteen_broken_streams_are_one_ejection(health: Health, clock: Clock) -> None:
    for _ in range(16):
        health.note_broken(A)
    assert health.num_ejections == 1
    clock.now += FIRST_EJECTION_S
    assert health.find_ejected() == frozenset()


def test_errors_of_its_own_in_a_row_put_it_out(health: Health) -> None:
    for _ in range(MAX_IN_A_ROW - 1):
        health.note_fault(A)
        health.note_good(B)
    assert health.find_ejected() == frozenset()
    health.note_fault(A)
    assert health.find_ejected() == {A}


def test_half_of_its_answers_put_it_out_though_never_in_a_row(health: Health, clock: Clock) -> None:
    for _ in range(2):
        health.note_good(A)
        health.note_fault(A)
    assert health.find_ejected() == frozenset()
    clock.now += 0.1
    for _ in range(2):
        health.note_good(A)
        health.note_fault(A)
    assert health.find_ejected() == {A}


def test_errors_that_are_rare_or_old_do_not(health: Health, clock: Clock) -> None:
    for _ in range(50):
        for _ in range(3):
            health.note_good(A)
        health.note_fault(A)
    assert health.find_ejected() == frozenset()
    for _ in range(20):
        clock.now += 60.0
        health.note_good(B)
        health.note_fault(B)
    assert health.find_ejected() == frozenset()


def test_a_replica_that_was_well_for_a_minute_starts_anew(health: Health, clock: Clock) -> None:
    for wait_s in (FIRST_EJECTION_S, 2 * FIRST_EJECTION_S):
        health.note_broken(A)
        clock.now += wait_s
        health.begin(A)
    health.note_good(A)
    clock.now += 61.0
    health.note_broken(A)
    clock.now += FIRST_EJECTION_S
    assert health.find_ejected() == frozenset()


def test_a_replica_that_is_gone_is_forgotten(health: Health) -> None:
    health.note_broken(A)
    health.note_broken(B)
    health.keep_only([B])
    assert health.find_ejected() == {B}
