"""The rows of uploads in parts. `UploadRows` is their only writer.

| state | | next |
|---|---|---|
| `open` | parts are taken | `completing`, `aborted` |
| `completing` | one request works on it and says so now and then; taken over once it is silent | `open`, `completed` |
| `completed` | the answer is stored, a version or a refusal | |
| `aborted` | given up by the client | |
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.adapters.pending import Promote
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.db.database import Database
from loraplex_registry.db.model import UploadRow
from loraplex_registry.errors import ConflictError, NotFoundError
from loraplex_registry.uploads.heartbeat import DEAD_AFTER

LIFE = timedelta(hours=24)
MAX_OPEN = 64
"""Uploads that a tenant may have open at once."""

_MAX_IN = 500
"""Values in one IN, which SQLite bounds."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What an upload asked for when it began, and what it saw then (see `Seen`)."""

    promote: Promote
    is_dry_run: bool
    base: str | None
    began_with: str | None
    live_revision: int


class UploadRows:
    """Finds uploads and moves them from state to state."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, tenant: TenantRef, values: dict[str, Any]) -> UploadRow:
        """Create the row of an upload of a tenant.

        Raises:
            ConflictError: The tenant has too many that are open.
        """

        async def work(session: AsyncSession) -> UploadRow:
            is_open = (UploadRow.tenant_id == tenant.id) & UploadRow.state.in_(("open", "completing"))
            query = sa.select(sa.func.count()).where(is_open, UploadRow.expires_at > datetime.now(UTC))
            if (await session.execute(query)).scalar_one() >= MAX_OPEN:
                raise ConflictError(f"{tenant.name} has {MAX_OPEN} open uploads; complete or delete one of them")
            row = UploadRow(tenant_id=tenant.id, tenant=tenant.name, state="open", **values)
            session.add(row)
            await session.flush()
            return row

        return await self._database.write(work)

    async def get(self, tenant: TenantRef, adapter: str, public_id: str) -> UploadRow:
        """Return an upload that is not over.

        Raises:
            NotFoundError: There is none.
        """
        if not (public_id.isascii() and public_id.replace("_", "").isalnum() and len(public_id) <= 40):
            raise _unknown(public_id)
        async with self._database.read() as session:
            found = await session.execute(
                sa.select(UploadRow).where(
                    UploadRow.public_id == public_id, UploadRow.tenant_id == tenant.id, UploadRow.adapter == adapter
                )
            )
            row = found.scalar_one_or_none()
        if row is None or row.state == "aborted" or (row.state != "completing" and row.expires_at <= datetime.now(UTC)):
            raise _unknown(public_id)
        return row

    async def try_claim(self, row: UploadRow) -> bool:
        """Begin to complete an upload that is open, or whose completion has died; False if it is another's."""
        now = datetime.now(UTC)
        is_dead = (UploadRow.state == "completing") & (UploadRow.touched_at < now - DEAD_AFTER)
        return await self._move(row, (UploadRow.state == "open") | is_dead, state="completing", touched_at=now)

    async def touch(self, row: UploadRow) -> None:
        """Say that a completion goes on."""
        await self._move(row, UploadRow.state == "completing", touched_at=datetime.now(UTC))

    async def reopen(self, row: UploadRow) -> None:
        """Give a completion back that failed: it may be repeated."""
        await self._move(row, UploadRow.state == "completing", state="open")

    async def finish(self, session: AsyncSession, row: UploadRow, status: int, body: str) -> bool:
        """Store the answer, within a transaction; False if the upload is over already."""
        values = {"state": "completed", "status": status, "body": body, "expires_at": datetime.now(UTC) + LIFE}
        return await _move(session, row, UploadRow.state.in_(("open", "completing")), values)

    async def finish_alone(self, row: UploadRow, status: int, body: str) -> None:
        """Store the answer in a transaction of its own, unless the upload is over already."""
        await self._database.write(lambda session: self.finish(session, row, status, body))

    async def improve(self, row: UploadRow, status: int, body: str) -> None:
        """Replace the stored answer by one that knows more."""
        await self._move(row, UploadRow.state == "completed", status=status, body=body)

    async def abort(self, row: UploadRow) -> bool:
        """Give an upload up; False if it is being completed, or is complete."""
        now = datetime.now(UTC)
        is_dead = (UploadRow.state == "completing") & (UploadRow.touched_at < now - DEAD_AFTER)
        return await self._move(row, (UploadRow.state == "open") | is_dead, state="aborted")

    async def delete_expired(self) -> None:
        """Forget uploads and answers whose time is over, but not while they are being completed."""
        now = datetime.now(UTC)
        is_held = (UploadRow.state == "completing") & (UploadRow.touched_at >= now - DEAD_AFTER)
        is_over = (UploadRow.expires_at <= now) & sa.not_(is_held)
        await self._database.write(lambda session: session.execute(sa.delete(UploadRow).where(is_over)))

    async def list_states(self, public_ids: Sequence[str]) -> dict[str, str]:
        """Return the states of those uploads that have a row."""
        states: dict[str, str] = {}
        async with self._database.read() as session:
            for start in range(0, len(public_ids), _MAX_IN):
                chunk = public_ids[start : start + _MAX_IN]
                query = sa.select(UploadRow.public_id, UploadRow.state).where(UploadRow.public_id.in_(chunk))
                states.update((public_id, state) for public_id, state in await session.execute(query))
        return states

    async def _move(self, row: UploadRow, is_allowed: sa.ColumnElement[bool], **values: Any) -> bool:
        return await self._database.write(lambda session: _move(session, row, is_allowed, values))


async def _move(
    session: AsyncSession, row: UploadRow, is_allowed: sa.ColumnElement[bool], values: dict[str, Any]
) -> bool:
    moved = await session.execute(
        sa.update(UploadRow).where(UploadRow.id == row.id, is_allowed).values(values).returning(UploadRow.id),
        execution_options={"synchronize_session": False},
    )
    return moved.first() is not None


def _unknown(public_id: str) -> NotFoundError:
    return NotFoundError(
        f"There is no upload {public_id[:40]!r} here: it was deleted, or its 24 hours are over; begin a new one",
        param="upload",
    )
