"""One gateway at a time on one database, on both kinds of database, also across kills and broken connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from gateway_world import running_world, until
from loraplex.db import claim as claim_module
from loraplex.db.claim import Claim
from loraplex.db.database import Database
from loraplex.errors import DatabaseInUseError, UnavailableError

# of this database: others of the server belong to tests that run beside
_LOCKS = (
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory'"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
ENDED_BY_ADMIN = sa.text(f"SELECT pid, pg_terminate_backend(pid) FROM ({_LOCKS}) AS held")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_module, "_PATIENCE_S", 0.0)


@pytest.fixture
async def claim(database_url: str) -> AsyncIterator[Claim]:
    taken = Claim(database_url)
    await taken.take()
    yield taken
    await taken.release()


async def test_a_database_has_one_gateway_and_then_another(claim: Claim, database_url: str) -> None:
    second = Claim(database_url)
    with pytest.raises(DatabaseInUseError) as caught:
        await second.take()
    assert (caught.value.exit_code, caught.value.code) == (3, "database_in_use")
    await claim.release()
    await second.take()
    await second.release()


async def test_a_gateway_that_is_just_ending_is_waited_for(
    claim: Claim, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_module, "_PATIENCE_S", 5.0)
    second = Claim(database_url)
    waiting = asyncio.create_task(second.take())
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await claim.release()
    await waiting
    await second.release()


async def test_a_second_gateway_is_refused_before_it_changes_anything(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_world(database_url, tmp_path) as first:
        with pytest.raises(DatabaseInUseError):
            async with running_world(database_url, tmp_path):
                pass
        assert (await first.call("GET", "/api/v1/tenants")).status_code == 200


class TestPostgres:
    """What a session's lock needs beyond a file's."""

    @pytest.fixture
    def dialect(self) -> str:
        return "postgresql"

    @pytest.fixture
    async def watched(self, claim: Claim, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.Event]:
        """Set once the claim is lost."""
        monkeypatch.setattr(claim_module, "_LOOK_EVERY_S", 0.2)
        lost = asyncio.Event()
        task = asyncio.create_task(claim.watch(lost.set))
        yield lost
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def end_sessions(self, database_url: str) -> set[int]:
        """Return those that were ended; each ends a moment later."""
        return set(await self.read(database_url, ENDED_BY_ADMIN))

    async def read(self, database_url: str, statement: sa.TextClause) -> list[int]:
        database = Database(database_url)
        async with database.read() as connection:
            found = (await connection.execute(statement)).scalars().all()
        await database.close()
        return list(found)

    async def wait_claimed(self, database_url: str, num_locks: int, ended: set[int]) -> None:
        async def is_claimed() -> bool:
            holders = await self.read(database_url, sa.text(_LOCKS))
            return len(holders) == num_locks and ended.isdisjoint(holders)

        await until(is_claimed)

    async def test_a_broken_connection_is_made_again(self, watched: asyncio.Event, database_url: str) -> None:
        ended = await self.end_sessions(database_url)
        await self.wait_claimed(database_url, 1, ended)
        with pytest.raises(DatabaseInUseError):
            await Claim(database_url).take()
        assert not watched.is_set()

    async def test_one_that_comes_too_late_is_told(self, watched: asyncio.Event, database_url: str) -> None:
        faster = Claim(database_url)
        await self.end_sessions(database_url)
        await faster.take()
        async with asyncio.timeout(60):
            await watched.wait()
        await faster.release()

    async def test_one_that_broke_under_somebodys_hands_is_made_again(
        self, database_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(claim_module, "_LOOK_EVERY_S", 0.2)
        mine, other = (Claim(database_url, name, is_shared=True) for name in ("gw_mine", "gw_other"))
        await mine.take()
        await other.take()
        ended = await self.end_sessions(database_url)
        for claim in (mine, other):
            for _ in range(2):
                with pytest.raises(UnavailableError):
                    await claim.try_lead("reconciler")
        tasks = [asyncio.create_task(claim.watch(lambda: None)) for claim in (mine, other)]
        # each has one in common with the others, and one of its own
        await self.wait_claimed(database_url, 4, ended)
        await until(lambda: all(claim._connection and not claim._connection.invalidated for claim in (mine, other)))
        assert not any(task.done() for task in tasks)
        async with other.hold_dead("gw_mine") as is_dead:
            assert not is_dead
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await mine.release()
        await other.release()

    async def test_one_of_several_does_a_duty_and_another_when_it_is_gone(self, database_url: str) -> None:
        first, second = (Claim(database_url, name, is_shared=True) for name in ("gw_first", "gw_second"))
        await first.take()
        await second.take()
        assert await first.try_lead("reconciler")
        assert not await second.try_lead("reconciler")
        assert await second.try_lead("another duty")
        assert await first.try_lead("reconciler")
        await first.release()
        assert await second.try_lead("reconciler")
        with pytest.raises(UnavailableError):
            await first.try_lead("reconciler")
        await second.release()


async def test_a_gateway_that_is_alone_does_every_duty(claim: Claim) -> None:
    assert await claim.try_lead("reconciler")
