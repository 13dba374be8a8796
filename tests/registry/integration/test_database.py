"""What the registry's database does when the server gives up a transaction, or does not answer in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import EpochRow, IdempotencyRow
from loraplex_registry.errors import UnavailableError


@pytest.fixture
def dialect() -> str:
    return "postgresql"


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(database_url, pool_size=4)
    yield opened
    await opened.close()


def _row(name: str) -> IdempotencyRow:
    return IdempotencyRow(key_id="key_1", route="r", idempotency_key=name)


async def _names(database: Database) -> list[str]:
    async with database.read() as session:
        return list(
            (await session.execute(sa.select(IdempotencyRow.idempotency_key).order_by(IdempotencyRow.id))).scalars()
        )


async def _fail(session: AsyncSession, sqlstate: str) -> None:
    await session.execute(sa.text(f"DO $$ BEGIN RAISE EXCEPTION 'made' USING ERRCODE = '{sqlstate}'; END $$"))


@pytest.mark.parametrize("sqlstate", ["40001", "40P01", "57P01"])
async def test_what_passes_is_tried_again_and_done_once(database: Database, sqlstate: str) -> None:
    tries = 0

    async def work(change: Change) -> int:
        nonlocal tries
        tries += 1
        change.session.add(_row("once"))
        await change.session.flush()
        if tries < 3:
            await _fail(change.session, sqlstate)
        return change.epoch

    before = await database.refresh_epoch()
    assert await database.change(work) == before + 1
    assert (tries, await _names(database), database.epoch.current) == (3, ["once"], before + 1)


async def test_tries_have_an_end(database: Database) -> None:
    tries = 0

    async def work(session: AsyncSession) -> None:
        nonlocal tries
        tries += 1
        await _fail(session, "40001")

    with pytest.raises(UnavailableError):
        await database.write(work)
    assert tries == 4


async def test_a_rule_that_is_broken_is_not_tried_again(database: Database) -> None:
    tries = 0

    async def work(session: AsyncSession) -> None:
        nonlocal tries
        tries += 1
        session.add(_row(""))

    with pytest.raises(sa.exc.IntegrityError):
        await database.write(work)
    assert tries == 1


async def test_a_connection_that_breaks_before_the_commit_is_made_again(database: Database) -> None:
    tries = 0

    async def work(session: AsyncSession) -> None:
        nonlocal tries
        tries += 1
        session.add(_row("once"))
        await session.flush()
        if tries == 1:
            await session.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    await database.write(work)
    assert (tries, await _names(database)) == (2, ["once"])


async def test_epochs_are_published_after_the_commit_and_before_the_return(database: Database) -> None:
    published: list[tuple[int, int]] = []

    async def publish(epoch: int) -> None:
        async with database.read() as session:
            published.append((epoch, (await session.execute(sa.select(EpochRow.epoch))).scalar_one()))

    async def work(change: Change) -> int:
        return change.epoch

    database.publish_epoch = publish
    epoch = await database.change(work)
    assert published == [(epoch, epoch)]


async def test_many_changes_queue_without_starving_readers(database: Database) -> None:
    async def work(change: Change) -> int:
        await asyncio.sleep(0.002)
        return change.epoch

    changing = [asyncio.create_task(database.change(work)) for _ in range(60)]
    await _names(database)
    assert not changing[-1].done()
    epochs = await asyncio.gather(*changing)
    assert epochs == list(range(epochs[0], epochs[0] + 60))


async def test_a_lock_that_is_held_too_long_and_a_statement_that_takes_too_long_end(
    database: Database, database_url: str
) -> None:
    async with database.read() as session:
        settings = {
            name: (await session.execute(sa.text(f"SHOW {name}"))).scalar_one()
            for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
        }
    assert settings == {
        "statement_timeout": "5s",
        "lock_timeout": "2s",
        "idle_in_transaction_session_timeout": "10s",
    }
    other = Database(database_url)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def hold(change: Change) -> None:
        entered.set()
        await leave.wait()

    async def nothing(change: Change) -> None:
        pass

    holding = asyncio.create_task(other.change(hold))
    await entered.wait()
    begun = time.monotonic()
    with pytest.raises(UnavailableError):
        await database.change(nothing)
    assert 1.5 < time.monotonic() - begun < 30
    leave.set()
    await holding
    await other.close()


async def test_the_pool_has_its_size_and_no_more(database: Database) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(4):
            session = await stack.enter_async_context(database.read())
            await session.execute(sa.text("SELECT 1"))
        begun = time.monotonic()
        with pytest.raises(UnavailableError):
            await _names(database)
        assert 1.5 < time.monotonic() - begun < 30
    await _names(database)
