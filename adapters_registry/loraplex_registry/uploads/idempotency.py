"""Honours `Idempotency-Key`: one key of one caller on one route does its work once in 24 hours.

A claim is a row, made before the body is read; without an answer the request is still running, or its process died
and the claim is taken over after a while. A refused or failed upload gives its claim back: it may be repeated.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.db.database import Database
from loraplex_registry.db.model import IdempotencyRow
from loraplex_registry.errors import IdempotencyReusedError, IdempotencyRunningError
from loraplex_registry.uploads.order import DryRunView, UploadOrder, UploadResult
from loraplex_registry.wire.adapter import VersionView

_LIFE = timedelta(hours=24)
_LONGEST_RUN = timedelta(minutes=15)


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
    async def hold(self, order: UploadOrder, route: str) -> AsyncIterator[Claim]:
        """Hold the order's key, if it has one, and give it back if the work fails.

        Raises:
            IdempotencyRunningError: Another request holds it.
        """
        claim = await self._claim(order, route)
        try:
            yield claim
        except BaseException:
            if claim.row_id is not None and claim.answer is None:
                await self._release(claim.row_id)
            raise

    async def finish(self, claim: Claim, content: str, result: UploadResult) -> None:
        """Store the answer for requests that repeat the key."""
        if claim.row_id is None or claim.answer is not None:
            return
        body = msgspec.json.encode(result.body).decode()
        await self._database.write(
            lambda session: session.execute(
                sa.update(IdempotencyRow)
                .where(IdempotencyRow.id == claim.row_id)
                .values(content=content, status=result.status, body=body)
            )
        )

    async def sweep(self) -> None:
        """Forget keys whose 24 hours are over."""
        before = datetime.now(UTC) - _LIFE
        await self._database.write(
            lambda session: session.execute(sa.delete(IdempotencyRow).where(IdempotencyRow.created_at < before))
        )

    async def _claim(self, order: UploadOrder, route: str) -> Claim:
        if order.idempotency_key is None:
            return Claim(None)
        claimed = IdempotencyRow(key_id=order.by.key_id, route=route, idempotency_key=order.idempotency_key)

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
    return age > (_LIFE if row.status is not None else _LONGEST_RUN)


def _read(row: IdempotencyRow) -> Claim:
    if row.status is None or row.body is None:
        raise IdempotencyRunningError
    return Claim(row.id, row.content, UploadResult(row.status, _read_body(row.body)))


def _read_body(text: str) -> VersionView | DryRunView:
    if "dry_run" in msgspec.json.decode(text, type=dict[str, msgspec.Raw]):
        return msgspec.json.decode(text, type=DryRunView)
    return msgspec.json.decode(text, type=VersionView)
