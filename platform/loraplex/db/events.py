"""Appends to the gateway's event table, inside the transaction of the change that an event tells of."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.tables import gateway_event
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_public_id, new_uuid


async def record_event(
    connection: AsyncConnection,
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
    """Record that `by` did `action` (such as `tenant.created`) to `subject`; none of the values is a secret.

    Args:
        connection: The transaction of the change.
        by: Who did it, with which key, in which request.
        action: `KIND.WHAT_WAS_DONE`, in the past tense.
        subject: What it was done to, by its full name.
        tenant_id: Of the tenant that it concerns.
        tenant: Its name.
        before: What changed, as it was; None if it was not there.
        after: The same fields as they are now; None if it is gone.
        details: What else helps a reader.
    """
    row = {
        "id": new_uuid(),
        "public_id": new_public_id("evt"),
        "at": datetime.now(UTC),
        "action": action,
        "tenant_id": tenant_id,
        "tenant": tenant,
        "subject": subject,
        "actor": by.actor,
        "key_id": by.key_id,
        "request_id": by.request_id,
        "details": {"before": before, "after": after, **(details or {})},
    }
    await connection.execute(gateway_event.insert(), row)
