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
    details: dict[str, Any] | None = None,
) -> None:
    """Record that `by` did `action` (such as `tenant.created`) to `subject`; details hold no secrets."""
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
        "details": details or {},
    }
    await connection.execute(gateway_event.insert(), row)
