"""Honours `Idempotency-Key`: one key of one caller on one route does its work once in 24 hours.

A claim is a row, made before the body is read. Without an answer the request is still running: it renews `created_at`
every few seconds, and a claim that is not renewed, as its process died, is taken over. A refused or failed upload gives
its claim back: it may be repeated.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.db.database import Database
from loraplex_registry.db.model import IdempotencyRow
from loraplex_registry.errors import IdempotencyReusedError, IdempotencyRunningError
from loraplex_registry.uploads.heartbeat import DEAD_AFTER, beating
from loraplex_registry.uploads.order import UploadResult
from loraplex_registry.wire.identity import Identity

_LIFE = timedelta(hours=24)


@dataclass(frozen=True)
class Claim:
    """A key held by this request, or the finished work that it stands for; without a row there is no key."""

    row_id: uuid.UUID | None
    content: str | None = None
    answer: UploadResult | None = None

    def find_answer(self, content: str) -> UploadResult | None:
        """Return the stored answer if the work is finished.

        Raises:
            IdempotencyReusedError: It was other content.
        """
        if self.answer is not None and self.content != content:
            raise IdempotencyReusedError
        return self.answer


class IdempotencyKeys:
    """The only writer of claims."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @asynccontextmanager
    async def hold(self, by: Identity, key: str | None, route: str) -> AsyncIterator[Claim]:
        """Hold the key of `by` on `route`, if there is one, and give it back if the work fails.

        Raises:
            IdempotencyRunningError: Another request holds it.
        """
        claim = await self._claim(by, key, route)
        if claim.row_id is None or claim.answer is not None:
            yield claim
            return
        try:
            async with beating(partial(self._renew, claim.row_id)):
                yield claim
        except BaseException:
            await self._release(claim.row_id)
            raise

    async def finish(self, claim: Claim, content: str, result: UploadResult) -> None:
        """Store the answer for requests that repeat the key."""
        if claim.row_id is None or claim.answer is not None:
            return
        values = {"content": content, "status": result.status, "body": result.encode(), "created_at": datetime.now(UTC)}
        await self._database.write(
            lambda session: session.execute(
                sa.update(IdempotencyRow).where(IdempotencyRow.id == claim.row_id).values(values)
            )
        )

    async def sweep(self) -> None:
        """Forget keys whose 24 hours are over."""
        before = datetime.now(UTC) - _LIFE
        await self._database.write(
            lambda session: session.execute(sa.delete(IdempotencyRow).where(IdempotencyRow.created_at < before))
        )

    async def _claim(self, by: Identity, key: str | None, route: str) -> Claim:
        if key is None:
            return Claim(None)
        claimed = IdempotencyRow(key_id=by.key_id, route=route, idempotency_key=key)

        async def work(session: AsyncSession) -> Claim:
            row = await _find(session, claimed)
            if row is not None and not _is_over(row):
                return _read(row)
            if row is not None:
                await session.delete(row)
                await session.flush()
            session.add(claimed)
            await session.flush()
            return Claim(claimed.id)

        try:
            return await self._database.write(work)
        except IntegrityError as error:
            raise IdempotencyRunningError from error

    async def _renew(self, row_id: uuid.UUID) -> None:
        running = (IdempotencyRow.id == row_id) & IdempotencyRow.status.is_(None)
        await self._database.write(
            lambda session: session.execute(
                sa.update(IdempotencyRow).where(running).values(created_at=datetime.now(UTC))
            )
        )

    async def _release(self, row_id: uuid.UUID) -> None:
        await self._database.write(
            lambda session: session.execute(sa.delete(IdempotencyRow).where(IdempotencyRow.id == row_id))
        )


async def _find(session: AsyncSession, claimed: IdempotencyRow) -> IdempotencyRow | None:
    found = await session.execute(
        sa.select(IdempotencyRow).where(
            IdempotencyRow.key_id == claimed.key_id,
            IdempotencyRow.route == claimed.route,
            IdempotencyRow.idempotency_key == claimed.idempotency_key,
        )
    )
    return found.scalar_one_or_none()


def _is_over(row: IdempotencyRow) -> bool:
    age = datetime.now(UTC) - row.created_at
    return age > (_LIFE if row.status is not None else DEAD_AFTER)


def _read(row: IdempotencyRow) -> Claim:
    if row.status is None or row.body is None:
        raise IdempotencyRunningError
    return Claim(row.id, row.content, UploadResult(row.status, msgspec.Raw(row.body.encode())))
