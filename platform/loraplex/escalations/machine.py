"""The states of an escalation and what leads from one to another. Pure: knows no database, no clock, no models.

requested -approve-> approved -register-> registered -activate-> active
requested -reject-> rejected
active, overdue -revert-> registered
active -lapse-> overdue                                      once `review_at` has passed; by the clock
overdue -revert-> registered                                 by the clock, if `on_overdue` is `revert`
approved, registered, active -extend-> the same;  overdue -extend-> active
requested, approved -expire-> expired                        once `expires_at` has passed; by the clock
requested, approved, registered, active, overdue -close-> closed
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

import msgspec

from loraplex.errors import ConflictError, InvalidRequestError

State = Literal["requested", "approved", "rejected", "registered", "active", "overdue", "closed", "expired"]
Verb = Literal["approve", "reject", "register", "activate", "revert", "extend", "close", "lapse", "expire"]
OnOverdue = Literal["keep", "revert"]

OPEN_STATES: tuple[State, ...] = ("requested", "approved", "registered", "active", "overdue")
SERVING_STATES: tuple[State, ...] = ("active", "overdue")
"""In these the adapter's name means the full fine-tune."""

REQUEST_LIFE = timedelta(days=30)
APPROVAL_LIFE = timedelta(days=90)
MAX_REVIEW = timedelta(days=366)
"""An exception is looked at once a year at least."""

TRANSITIONS: dict[Verb, dict[State, State]] = {
    "approve": {"requested": "approved"},
    "reject": {"requested": "rejected"},
    "register": {"approved": "registered"},
    "activate": {"registered": "active"},
    "revert": {"active": "registered", "overdue": "registered"},
    "extend": {"approved": "approved", "registered": "registered", "active": "active", "overdue": "active"},
    "close": dict.fromkeys(OPEN_STATES, "closed"),
    "lapse": {"active": "overdue"},
    "expire": {"requested": "expired", "approved": "expired"},
}
_CLOCK_VERBS = ("lapse", "expire")


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """Where an escalation stands, and the dates that move it. `review_at` is None until it is approved."""

    state: State
    expires_at: datetime
    review_at: datetime | None = None
    on_overdue: OnOverdue = "keep"


def check_verb(state: State, verb: Verb) -> State:
    """Return the state that `verb` leads to.

    Raises:
        ConflictError: It leads nowhere from `state`; the message names it and what is possible.
    """
    target = TRANSITIONS[verb].get(state)
    if target is None:
        raise ConflictError(f"This escalation is {state}; {_explain_possible(state)}", param="state")
    return target


def move(
    course: Course,
    verb: Verb,
    now: datetime,
    *,
    review_at: datetime | None = None,
    on_overdue: OnOverdue | None = None,
) -> Course:
    """Return the course after `verb`.

    Args:
        course: As it is; what the clock does to it before `now` is done already (see `find_due`).
        verb: What is done.
        now: When.
        review_at: The new date, with `approve` and `extend`.
        on_overdue: With `approve`: what shall be done if nobody reviews in time.

    Raises:
        ConflictError: The state does not allow it.
        InvalidRequestError: `review_at` is not after now and the date that it replaces, or too far away.
    """
    state = check_verb(course.state, verb)
    if verb in ("approve", "extend"):
        check_review_at(review_at, now, course.review_at)
    if verb == "activate" and (course.review_at is None or course.review_at <= now):
        raise ConflictError(
            f"This escalation is {course.state} and its review was due on {_day(course.review_at)}; extend it first",
            param="state",
        )
    if verb == "approve":
        expires_at = max(course.expires_at, now + APPROVAL_LIFE)
        return Course(state=state, expires_at=expires_at, review_at=review_at, on_overdue=on_overdue or "keep")
    return msgspec.structs.replace(course, state=state, review_at=review_at or course.review_at)


def find_due(course: Course, now: datetime) -> Verb | None:
    """Return what the clock does to this course at `now`, None if nothing; do it and ask again."""
    if course.state in TRANSITIONS["expire"] and course.expires_at <= now:
        return "expire"
    if course.review_at is None or course.review_at > now:
        return None
    if course.state == "active":
        return "lapse"
    return "revert" if course.state == "overdue" and course.on_overdue == "revert" else None


def check_review_at(review_at: datetime | None, now: datetime, former: datetime | None = None) -> datetime:
    """Return a review date that is one.

    Raises:
        InvalidRequestError: It is missing, past, not after the former one, or more than a year away.
    """
    if review_at is None:
        raise InvalidRequestError(
            "review_at is required: the day on which the exception is looked at", param="review_at"
        )
    if review_at <= now:
        raise InvalidRequestError("review_at is in the past", param="review_at")
    if former is not None and review_at <= former:
        raise InvalidRequestError(f"review_at is not after the present one, {_day(former)}", param="review_at")
    if review_at > now + MAX_REVIEW:
        raise InvalidRequestError(f"review_at is more than {MAX_REVIEW.days} days away", param="review_at")
    return review_at


def list_verbs(state: State) -> list[Verb]:
    """Return what people may do in `state`."""
    return [verb for verb, ways in TRANSITIONS.items() if state in ways and verb not in _CLOCK_VERBS]


def _explain_possible(state: State) -> str:
    verbs = list_verbs(state)
    if not verbs:
        return "nothing more can be done with it; open another one"
    return f"what can be done now: {', '.join(verbs)}"


def _day(at: datetime | None) -> str:
    return "no day" if at is None else at.date().isoformat()
