"""Escalations as rows and as the API shows them: reading, writing one step of the course, its history and its event."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.events import record_event
from loraplex.db.tables import escalation, escalation_history
from loraplex.errors import NotFoundError
from loraplex.escalations.amount import show_amount
from loraplex.escalations.machine import Course, Verb, list_verbs
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_uuid

Row = dict[str, Any]
VERB_TO_ACTION: dict[str, str] = {
    "open": "escalation.opened",
    "approve": "escalation.approved",
    "reject": "escalation.rejected",
    "register": "escalation.registered",
    "activate": "escalation.activated",
    "revert": "escalation.reverted",
    "extend": "escalation.extended",
    "close": "escalation.closed",
    "lapse": "escalation.overdue",
    "expire": "escalation.expired",
}


def read_course(row: Row) -> Course:
    """Return where an escalation stands."""
    return Course(
        state=row["state"],
        expires_at=row["expires_at"],
        review_at=row["review_at"],
        on_overdue=row["on_overdue"] or "keep",
    )


async def get_row(connection: AsyncConnection, public_id: str, tenant_id: str | None, *, locks: bool = False) -> Row:
    """Return the row of an escalation that the caller may see.

    Args:
        connection: Reads, or writes where it `locks`.
        public_id: Its id.
        tenant_id: The only tenant whose are seen; None sees all.
        locks: Keep others from changing it until this transaction ends.

    Raises:
        NotFoundError: There is none.
    """
    query = sa.select(escalation).where(escalation.c.public_id == public_id)
    if tenant_id is not None:
        query = query.where(escalation.c.tenant_id == tenant_id)
    if locks:
        query = query.with_for_update()
    found = (await connection.execute(query)).mappings().first()
    if found is None:
        raise NotFoundError("There is no such escalation, or it is not yours.", param="escalation")
    return dict(found)


async def write_step(
    connection: AsyncConnection,
    row: Row,
    verb: Verb,
    course: Course,
    by: Identity,
    now: datetime,
    *,
    values: dict[str, Any] | None = None,
    details: dict[str, Any] | None = None,
) -> Row:
    """Write what `verb` made of an escalation whose row is locked, with its history and its event; return the row.

    Args:
        connection: The transaction.
        row: As it was.
        verb: What was done.
        course: What it led to.
        by: Who did it.
        now: When.
        values: Columns beside those of the course.
        details: What else the history tells.
    """
    dates = {} if course.review_at is None else {"review_at": course.review_at, "on_overdue": course.on_overdue}
    changes = {
        "state": course.state,
        "expires_at": course.expires_at,
        "revision": row["revision"] + 1,
        "changed_at": now,
        **dates,
        **(values or {}),
    }
    after = row | changes
    await connection.execute(sa.update(escalation).where(escalation.c.id == row["id"]).values(changes))
    await write_history(connection, after, verb, row["state"], by, now, details or {})
    return after


async def write_history(
    connection: AsyncConnection,
    row: Row,
    verb: str,
    before: str | None,
    by: Identity,
    now: datetime,
    details: dict[str, Any],
) -> None:
    """Add one line to the history of an escalation, and the event of the same act."""
    line = {
        "id": new_uuid(),
        "escalation_id": row["id"],
        "revision": row["revision"],
        "at": now,
        "verb": verb,
        "from_state": before,
        "to_state": row["state"],
        "actor": by.actor,
        "key_id": by.key_id,
        "request_id": by.request_id,
        "details": details,
    }
    await connection.execute(escalation_history.insert(), line)
    await record_event(
        connection,
        by,
        VERB_TO_ACTION[verb],
        row["public_id"],
        tenant_id=row["tenant_id"],
        tenant=row["tenant"],
        before=None if before is None else {"state": before},
        after={"state": row["state"]},
        details={"model": f"{row['tenant']}/{row['adapter']}", **details},
    )


async def list_history(connection: AsyncConnection, escalation_id: uuid.UUID) -> list[Row]:
    """Return the history of an escalation, oldest first."""
    query = (
        sa.select(escalation_history)
        .where(escalation_history.c.escalation_id == escalation_id)
        .order_by(escalation_history.c.revision)
    )
    return [dict(row) for row in (await connection.execute(query)).mappings()]


class ApprovalView(msgspec.Struct, frozen=True):
    """What an administrator agreed to, and who answers for it."""

    owner: str
    justification: str
    budget_per_month: float | None
    currency: str
    review_at: str
    on_overdue: str
    approved_by: str
    approved_at: str


class FullView(msgspec.Struct, frozen=True):
    """The full fine-tune that was registered; `model` calls exactly this version."""

    model: str
    version: int
    pool: str
    digest: str
    cost_per_month: float | None
    currency: str


class EscalationView(msgspec.Struct, frozen=True, kw_only=True):
    """An escalation in a list."""

    id: str
    tenant: str
    adapter: str
    version: int
    base_model: str
    state: str
    is_overdue: bool
    owner: str | None
    requested_by: str
    created_at: str
    age_days: int
    expires_at: str
    review_at: str | None
    cost_per_month: float | None
    currency: str | None
    verbs: list[str]


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a history."""

    at: str
    verb: str
    from_state: str | None
    to_state: str
    actor: str
    key_id: str
    request_id: str
    details: dict[str, Any]


class WholeEscalationView(EscalationView, frozen=True, kw_only=True):
    """An escalation by itself: with evidence, figures, approval, the full fine-tune, and history."""

    digest: str
    reason: str | None
    evidence: dict[str, Any]
    figures: dict[str, Any]
    approval: ApprovalView | None
    full: FullView | None
    history: list[StepView]


def show(row: Row, now: datetime) -> EscalationView:
    """Return an escalation as lists show it; `row` is as the clock has it at `now`."""
    return EscalationView(**_show_fields(row, now))


def show_whole(row: Row, history: list[Row], now: datetime) -> WholeEscalationView:
    """Return an escalation with everything that is known of it."""
    return WholeEscalationView(
        **_show_fields(row, now),
        digest=row["digest"],
        reason=row["reason"],
        evidence=row["evidence"],
        figures=row["figures"],
        approval=_show_approval(row),
        full=_show_full(row),
        history=[_show_step(line) for line in history],
    )


def show_time(at: datetime) -> str:
    """RFC 3339 in UTC."""
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _show_fields(row: Row, now: datetime) -> dict[str, Any]:
    return {
        "id": row["public_id"],
        "tenant": row["tenant"],
        "adapter": row["adapter"],
        "version": row["version"],
        "base_model": row["base"],
        "state": row["state"],
        "is_overdue": row["state"] == "overdue",
        "owner": row["owner"],
        "requested_by": row["requested_by"],
        "created_at": show_time(row["created_at"]),
        "age_days": max(0, (now - row["created_at"]).days),
        "expires_at": show_time(row["expires_at"]),
        "review_at": None if row["review_at"] is None else show_time(row["review_at"]),
        "cost_per_month": show_amount(row["cost_cents"]),
        "currency": row["currency"],
        "verbs": list_verbs(row["state"]),
    }


def _show_approval(row: Row) -> ApprovalView | None:
    found = row["approval"]
    if found is None:
        return None
    return ApprovalView(
        owner=row["owner"],
        justification=found["justification"],
        budget_per_month=show_amount(row["budget_cents"]),
        currency=row["currency"],
        review_at=show_time(row["review_at"]),
        on_overdue=row["on_overdue"],
        approved_by=found["approved_by"],
        approved_at=found["approved_at"],
    )


def _show_full(row: Row) -> FullView | None:
    if row["pool"] is None:
        return None
    return FullView(
        model=f"{row['tenant']}/{row['adapter']}@{row['full_version']}",
        version=row["full_version"],
        pool=row["pool"],
        digest=row["full_digest"],
        cost_per_month=show_amount(row["cost_cents"]),
        currency=row["currency"],
    )


def _show_step(line: Row) -> StepView:
    fields = {name: line[name] for name in StepView.__struct_fields__ if name != "at"}
    return StepView(at=show_time(line["at"]), **fields)
