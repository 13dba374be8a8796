"""Escalations as a pure machine: random acts and a moving clock against the sentences of the decision."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from examples import examples
from loraplex.errors import ConflictError, InvalidRequestError
from loraplex.escalations.machine import (
    APPROVAL_LIFE,
    MAX_REVIEW,
    OPEN_STATES,
    REQUEST_LIFE,
    TRANSITIONS,
    Course,
    State,
    Verb,
    find_due,
    list_verbs,
    move,
)

START = datetime(2027, 1, 1, tzinfo=UTC)
FINAL = {"rejected", "closed", "expired"}
# the decision's sentences, written once more as pairs
ALLOWED = {
    ("requested", "approve", "approved"), ("requested", "reject", "rejected"), ("approved", "register", "registered"),
    ("registered", "activate", "active"), ("active", "revert", "registered"), ("overdue", "revert", "registered"),
    ("approved", "extend", "approved"), ("registered", "extend", "registered"), ("active", "extend", "active"),
    ("overdue", "extend", "active"), ("requested", "close", "closed"), ("approved", "close", "closed"),
    ("registered", "close", "closed"), ("active", "close", "closed"), ("overdue", "close", "closed"),
    ("active", "lapse", "overdue"), ("requested", "expire", "expired"), ("approved", "expire", "expired"),
}  # fmt: skip


def build_course(state: State = "requested", **changes: object) -> Course:
    fields = {"state": state, "expires_at": START + REQUEST_LIFE} | changes
    return Course(**fields)  # type: ignore[arg-type]


class EscalationMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.course = build_course()
        self.past: list[State] = ["requested"]
        self.num_reviews_set = 0
        self.num_clock_reverts = 0

    def do(self, verb: Verb, by_clock: bool = False, **options: object) -> None:
        before = self.course
        legal = {(start, target) for start, one, target in ALLOWED if one == verb}
        is_late = verb == "activate" and before.review_at is not None and before.review_at <= self.now
        if before.state not in {start for start, _ in legal} or is_late:
            with pytest.raises(ConflictError, match=before.state):
                move(before, verb, self.now, **options)  # type: ignore[arg-type]
            return
        self.course = move(before, verb, self.now, **options)  # type: ignore[arg-type]
        assert (before.state, self.course.state) in legal
        self.past.append(self.course.state)
        self.num_reviews_set += verb in ("approve", "extend")
        self.num_clock_reverts += by_clock and verb == "revert"

    @rule(verb=st.sampled_from(["reject", "register", "activate", "revert", "close", "register", "activate"]))
    def act(self, verb: Verb) -> None:
        self.do(verb)

    @rule(days=st.integers(1, 366), on_overdue=st.sampled_from(["keep", "revert"]))
    def approve(self, days: int, on_overdue: str) -> None:
        self.do("approve", review_at=self.now + timedelta(days=days), on_overdue=on_overdue)

    @rule(days=st.integers(1, 60))
    def extend(self, days: int) -> None:
        later = max(self.course.review_at or self.now, self.now) + timedelta(days=days)
        if later > self.now + MAX_REVIEW:
            return
        self.do("extend", review_at=later)

    @rule(days=st.integers(0, 80))
    def wait(self, days: int) -> None:
        self.now += timedelta(days=days)
        for _ in range(3):
            due = find_due(self.course, self.now)
            if due is None:
                return
            self.do(due, by_clock=True)
        assert find_due(self.course, self.now) is None, "the clock never turns for ever"

    @invariant()
    def holds(self) -> None:
        state = self.course.state
        assert not FINAL & set(self.past[:-1]), "nothing follows an end"
        assert (state in FINAL) == (list_verbs(state) == [])
        assert (state in FINAL) == (state not in OPEN_STATES)
        if state in ("approved", "registered", "active", "overdue"):
            assert self.course.review_at is not None
        if state in ("requested", "approved"):
            assert self.course.expires_at > self.now
        if state == "active":
            assert self.course.review_at > self.now, "it would be overdue"  # type: ignore[operator]
        if state == "overdue":
            assert self.course.on_overdue == "keep", "it would be reverted"
        # once for each date that somebody set
        assert self.num_clock_reverts <= self.num_reviews_set
        if "active" in self.past:
            assert self.past.index("approved") < self.past.index("registered") < self.past.index("active")


def test_random_acts_keep_to_the_decision() -> None:
    run_state_machine_as_test(EscalationMachine, settings=settings(max_examples=examples(40), stateful_step_count=25))


def test_the_table_is_the_decision() -> None:
    assert {(start, verb, end) for verb, ways in TRANSITIONS.items() for start, end in ways.items()} == ALLOWED
    assert set(get_args(Verb)) == set(TRANSITIONS)
    assert set(get_args(State)) == {*OPEN_STATES, *FINAL}


def test_a_verb_that_leads_nowhere_names_the_state_and_what_is_possible() -> None:
    with pytest.raises(ConflictError) as caught:
        move(build_course("requested"), "activate", START)
    assert caught.value.message == ("This escalation is requested; what can be done now: approve, reject, close")
    with pytest.raises(ConflictError, match="closed; nothing more can be done with it; open another one"):
        move(build_course("closed"), "revert", START)


@pytest.mark.parametrize(
    ("review_at", "message"),
    [
        (None, "required"),
        (START, "in the past"),
        (START - timedelta(days=1), "in the past"),
        (START + MAX_REVIEW + timedelta(seconds=1), "days away"),
    ],
)
def test_an_approval_needs_a_review_within_a_year(review_at: datetime | None, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        move(build_course(), "approve", START, review_at=review_at)
    assert caught.value.param == "review_at"


def test_an_extension_is_later_than_what_it_extends() -> None:
    course = build_course("active", review_at=START + timedelta(days=30))
    with pytest.raises(InvalidRequestError, match="not after the present one, 2027-01-31"):
        move(course, "extend", START, review_at=START + timedelta(days=30))


def test_approval_gives_time_for_the_training_and_never_takes_any() -> None:
    approved = move(build_course(), "approve", START, review_at=START + timedelta(days=200))
    assert approved.expires_at == START + APPROVAL_LIFE
    long = build_course(expires_at=START + timedelta(days=120))
    assert move(long, "approve", START, review_at=START + timedelta(days=200)).expires_at == long.expires_at


def test_after_the_review_date_it_is_overdue_and_reverted_once_if_so_agreed() -> None:
    at = START + timedelta(days=10)
    active = build_course("active", review_at=at, on_overdue="revert")
    assert find_due(active, at - timedelta(seconds=1)) is None
    assert find_due(active, at) == "lapse"
    overdue = move(active, "lapse", at)
    assert find_due(overdue, at) == "revert"
    reverted = move(overdue, "revert", at)
    assert (reverted.state, find_due(reverted, at + timedelta(days=99))) == ("registered", None)
    with pytest.raises(ConflictError, match="its review was due on 2027-01-11; extend it first"):
        move(reverted, "activate", at)
    extended = move(reverted, "extend", at, review_at=at + timedelta(days=5))
    assert move(extended, "activate", at).state == "active"


def test_one_that_may_stay_stays_overdue_until_somebody_acts() -> None:
    at = START + timedelta(days=10)
    overdue = build_course("overdue", review_at=at)
    assert find_due(overdue, at + timedelta(days=300)) is None
    assert move(overdue, "extend", at, review_at=at + timedelta(days=1)).state == "active"
