"""From what a team asks for to the row of a new escalation: the gap judged, the LoRA measured, its calls counted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.database import Database
from loraplex.db.tables import escalation
from loraplex.errors import ConflictError, InvalidRequestError
from loraplex.escalations.act import EscalationOpening
from loraplex.escalations.clock import as_of, let_clock_run
from loraplex.escalations.evidence import judge_evidence
from loraplex.escalations.four_eyes import find_holder
from loraplex.escalations.machine import OPEN_STATES, REQUEST_LIFE
from loraplex.escalations.port import Models
from loraplex.escalations.record import Row
from loraplex.escalations.traffic import read_traffic
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_public_id, new_uuid

MAX_LIFE = timedelta(days=180)
_LATER_COLUMNS = (
    "approval",
    "owner",
    "budget_cents",
    "currency",
    "review_at",
    "on_overdue",
    "pool",
    "full_version",
    "full_digest",
    "cost_cents",
    "held_by",
    "held_until",
)


async def build_row(database: Database, models: Models, by: Identity, wanted: EscalationOpening) -> Row:
    """Return the row of a new escalation of the target tenant of `by`.

    Raises:
        InvalidRequestError: The evidence shows nothing to escalate.
        ConflictError: The adapter has one that is open.
    """
    assert by.target_tenant_id is not None, "the route names a tenant"
    gap = judge_evidence(wanted.evidence)
    now = datetime.now(UTC)
    expires_at = _choose_end(wanted.expires_at, now)
    await _check_none_open(database, by.target_tenant_id, wanted.adapter, now)
    measured = await models.measure_saturation(by, wanted.adapter, wanted.version)
    traffic = await read_traffic(database, by.target_tenant_id, measured.adapter_id, now)
    async with database.read() as connection:
        holder = await find_holder(connection, by.key_id, by.actor)
    return {
        "id": new_uuid(),
        "public_id": new_public_id("esc"),
        "tenant_id": by.target_tenant_id,
        "tenant": by.target_tenant,
        "adapter_id": measured.adapter_id,
        "adapter": wanted.adapter,
        "base": measured.base,
        "version": measured.version,
        "digest": measured.digest,
        "evidence": msgspec.to_builtins(wanted.evidence),
        "figures": {
            "gap": gap,
            "traffic": traffic,
            "saturation": msgspec.to_builtins(measured.saturation),
            "problem": measured.problem,
        },
        "reason": wanted.reason,
        "requested_by": by.actor,
        "requested_key": by.key_id,
        "requested_issuer": holder.issuer,
        "created_at": now,
        "state": "requested",
        "revision": 1,
        "expires_at": expires_at,
        "changed_at": now,
        **dict.fromkeys(_LATER_COLUMNS),
    }


async def end_expired(connection: AsyncConnection, adapter_id: str, now: datetime) -> None:
    """Write the end of what has expired for an adapter: nothing that is over stands in the way of a new one."""
    query = sa.select(escalation).where(escalation.c.adapter_id == adapter_id, escalation.c.state.in_(OPEN_STATES))
    for row in (await connection.execute(query.with_for_update())).mappings().all():
        await let_clock_run(connection, dict(row), now)


async def _check_none_open(database: Database, tenant_id: str, adapter: str, now: datetime) -> None:
    """Tell early of one that is open; the index decides between those that come at once."""
    query = sa.select(escalation).where(
        escalation.c.tenant_id == tenant_id, escalation.c.adapter == adapter, escalation.c.state.in_(OPEN_STATES)
    )
    async with database.read() as connection:
        rows = [as_of(dict(row), now) for row in (await connection.execute(query)).mappings()]
    for row in rows:
        if row["state"] in OPEN_STATES:
            raise ConflictError(
                f"This adapter has the open escalation {row['public_id']}; close that first", param="adapter"
            )


def _choose_end(wanted: datetime | None, now: datetime) -> datetime:
    if wanted is None:
        return now + REQUEST_LIFE
    if not now < wanted <= now + MAX_LIFE:
        raise InvalidRequestError(f"expires_at lies within {MAX_LIFE.days} days from now", param="expires_at")
    return wanted
