"""Appends to the registry's event table, inside the transaction of the change that an event tells of.

Nothing else writes events. Details hold no file contents and no secrets.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.db.model import EventRow
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_public_id

_MAX_SUBJECT_LEN = 300


def record_event(
    session: AsyncSession,
    by: Identity,
    action: str,
    subject: str,
    *,
    tenant_id: str | None = None,
    tenant: str | None = None,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
    details: dict[str, Any] | None = None,
) -> None:
    """Record that `by` did `action` (such as `adapter.uploaded`) to `subject`, once the transaction commits.

    Args:
        session: The transaction of the change.
        by: Who did it, with which key, in which request.
        action: `KIND.WHAT_WAS_DONE`, in the past tense.
        subject: What it was done to, by its full name.
        tenant_id: Of the tenant that it concerns.
        tenant: Its name.
        before: What changed, as it was; None if it was not there.
        after: The same fields as they are now; None if it is gone.
        details: What else helps a reader.
    """
    session.add(
        EventRow(
            public_id=new_public_id("evt"),
            action=action,
            tenant_id=tenant_id,
            tenant=tenant,
            subject=subject[:_MAX_SUBJECT_LEN],
            actor=by.actor,
            key_id=by.key_id,
            request_id=by.request_id,
            details={"before": before, "after": after, **(details or {})},
        )
    )
