"""What time does to escalations: in rows that are read, in rows that are locked, and as conditions of queries."""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.tables import escalation
from loraplex.escalations.machine import Verb, find_due, move
from loraplex.escalations.record import Row, read_course, write_step
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_public_id


def is_held(row: Row, now: datetime) -> bool:
    """Whether a request is moving the models of an escalation just now."""
    return row["held_until"] is not None and row["held_until"] > now


async def let_clock_run(connection: AsyncConnection, row: Row, now: datetime) -> Row:
    """Write what time has done to an escalation, as far as that needs no model moved."""
    while (due := find_clock_verb(row, now)) is not None:
        row = await write_step(connection, row, due, move(read_course(row), due, now), build_clock_identity(), now)
    return row


def as_of(row: Row, now: datetime) -> Row:
    """Return a row as the clock will have written it."""
    while (due := find_clock_verb(row, now)) is not None:
        row = row | {"state": move(read_course(row), due, now).state}
    return row


def find_clock_verb(row: Row, now: datetime) -> Verb | None:
    """Return what time does to a row by itself; one whose models are being moved does not end under that."""
    due = find_due(read_course(row), now)
    if due == "expire" and is_held(row, now):
        return None
    return due if due in ("lapse", "expire") else None


def build_clock_identity() -> Identity:
    """Who does what is due: the gateway itself."""
    return Identity(
        role="admin",
        tenant_id=None,
        tenant=None,
        scopes=(),
        key_id="gateway",
        actor="gateway",
        request_id=new_public_id("req"),
    )


def is_over(now: datetime) -> sa.ColumnElement[bool]:
    """Requests that have expired, whether or not that is written."""
    return escalation.c.state.in_(("requested", "approved")) & (escalation.c.expires_at <= now)


def is_late(now: datetime) -> sa.ColumnElement[bool]:
    """Active ones that are overdue, whether or not that is written."""
    return (escalation.c.state == "active") & (escalation.c.review_at <= now)


def may_be_due(now: datetime) -> sa.ColumnElement[bool]:
    """All that the clock may have something to do with."""
    is_to_revert = (escalation.c.state == "overdue") & (escalation.c.on_overdue == "revert")
    return is_over(now) | is_late(now) | (is_to_revert & (escalation.c.review_at <= now))


def is_in_state(state: str, now: datetime) -> sa.ColumnElement[bool]:
    """Rows that are in `state` as the clock has it, whether or not that is written."""
    is_written = escalation.c.state == state
    if state == "expired":
        return is_written | is_over(now)
    if state == "overdue":
        return is_written | is_late(now)
    return is_written & ~is_over(now) & ~is_late(now)
