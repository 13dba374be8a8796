"""A control plane of this release at work while the next release takes the database ahead of it: nobody notices."""

from __future__ import annotations

import asyncio
import json
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from doctor_world import look, see
from gateway_world import GatewayWorld, running_world
from loraplex.cli.app import main
from loraplex.doctor.database import check_database
from loraplex_registry.app import head
from next_schema import FUTURE, NextUpgrade, write_next_migrations
from teams_at_work import Fleet, Team, at_work

pytestmark = pytest.mark.endure

WARM_ROUNDS = 6
"""After five times a connection to Postgres keeps a statement's plan, which must bear what comes."""

GATEWAYS_PATIENCE_S = 2.0
"""So long a gateway waits for a lock before it says that the database does not answer."""

CHANGED = ("tenant", "api_key", "adapter", "alias", "base", "adapter_version")
"""Tables whose rows this program goes on changing."""


@pytest.fixture
def num_teams(long: Callable[[float, float], float]) -> int:
    """Two meet one another as three do."""
    return int(long(2, 3))


@contextmanager
def _connected(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url.replace("sqlite+aiosqlite", "sqlite"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        yield connection


def _write_as_the_next_release(url: str) -> dict[str, int]:
    """Write what only the next release knows, and return how many rows of each table have it."""
    with _connected(url) as connection:
        alias = connection.execute(sa.text("SELECT id FROM alias")).scalars().first()
        connection.execute(sa.text("INSERT INTO future VALUES (1, :alias, 'kept')"), {"alias": alias})
        counts = {table: connection.execute(sa.text(f"UPDATE {table} SET joules = 9")).rowcount for table in CHANGED}
    assert all(counts.values())
    return counts


def _count_joules(url: str) -> dict[str, int]:
    with _connected(url) as connection:
        return {
            table: connection.execute(sa.text(f"SELECT count(*) FROM {table} WHERE joules = 9")).scalar_one()
            for table in CHANGED
        }


async def _run(*arguments: str | Path) -> int:
    return int(await asyncio.to_thread(main, [str(argument) for argument in arguments]))


def _place(database_url: str, folder: Path) -> dict[str, str]:
    return {
        "LORAPLEX_DATABASE_URL": database_url,
        "LORAPLEX_OBJECT_STORE_URL": f"file://{folder}/objects",
        "LORAPLEX_DATA_DIR": str(folder),
    }


async def test_nobody_notices_that_the_next_release_has_upgraded_the_database(
    dialect: str,
    database_url: str,
    tmp_path: Path,
    num_teams: int,
    long: Callable[[float, float], float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if dialect == "sqlite" and not long(0, 1):
        pytest.skip("several programs share Postgres, and SQLite only at full length")
    for name, value in _place(database_url, tmp_path).items():
        monkeypatch.setenv(name, value)
    migrations = write_next_migrations(tmp_path / "next")
    async with running_world(database_url, tmp_path) as world:
        async with at_work(world, num_teams) as fleet:
            await fleet.work_on(WARM_ROUNDS)
            done = json.loads(await (await NextUpgrade.start(migrations, database_url)).wait())
            assert (done["before"], done["after"]) == (head(), FUTURE)
            await fleet.work_on(2)
            written = await asyncio.to_thread(_write_as_the_next_release, database_url)
            await fleet.work_on(2)
            await _check_what_is_said(world, capsys)
        for team in fleet.teams:
            await team.check_nothing_is_lost()
        assert _count_joules(database_url) == written
    await _check_a_later_start(database_url, tmp_path, fleet)


async def _check_what_is_said(world: GatewayWorld, capsys: pytest.CaptureFixture[str]) -> None:
    """The schema is newer than this program: a note, and nowhere an error."""
    url = str(world.gateway._settings.database_url)
    assert (await world.call("GET", "/readyz", key=None)).status_code == 200
    found = (await asyncio.to_thread(look, check_database, see({"LORAPLEX_DATABASE_URL": url})))["database.migrations"]
    assert found.verdict == "ok"
    assert found.message == f"The database is at {FUTURE}, ahead of this program's {head()}, and still serves it."
    capsys.readouterr()
    assert await _run("db", "current", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"current": FUTURE, "head": head(), "is_current": False, "is_served": True}
    assert await _run("db", "current") == 0
    assert "newer than this program, which it serves" in capsys.readouterr().err
    assert await _run("db", "upgrade") == 0
    assert "nothing to do" in capsys.readouterr().err
    # every adapter is there, by its digest
    assert await _run("backup", "verify", "--json") == 0
    assert json.loads(capsys.readouterr().out)["is_whole"]


async def _check_a_later_start(database_url: str, folder: Path, fleet: Fleet) -> None:
    """A part of this release that starts now, as one that was rolled back does, finds everything."""
    async with running_world(database_url, folder) as world:
        for team in fleet.teams:
            team.world = world
            await team.call(team.key, team.digests[-1])
            await team.check_nothing_is_lost()


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_backups_of_this_release_are_made_and_restored_on_the_next_schema(
    database_url: str, tmp_path: Path, num_teams: int, capsys: pytest.CaptureFixture[str]
) -> None:
    migrations = write_next_migrations(tmp_path / "next")
    data, restored = tmp_path, tmp_path / "restored"
    async with running_world(database_url, data) as world, at_work(world, num_teams) as fleet:
        await fleet.work_on(1)
        assert await _run("backup", "create", tmp_path / "before", "--data-dir", data) == 0
        upgrade = await NextUpgrade.start(migrations, database_url)
        assert await _run("backup", "create", tmp_path / "beside", "--data-dir", data) == 0
        await upgrade.wait()
        await fleet.work_on(1)
        assert await _run("backup", "create", tmp_path / "after", "--data-dir", data) == 0
    capsys.readouterr()
    for name in ("before", "beside", "after"):
        assert await _run("backup", "verify", tmp_path / name) == 0
    assert await _run("backup", "restore", tmp_path / "after", "--data-dir", restored, "--json") == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (facts["revision"], facts["now_at"]) == (FUTURE, FUTURE)
    async with running_world(f"sqlite+aiosqlite:///{restored}/loraplex.db", restored) as world:
        for team in fleet.teams:
            team.world = world
            await team.call(team.key, await _find_live(team))


async def _find_live(team: Team) -> str:
    """The digest that the team's name means in what was restored."""
    adapter = f"/api/v1/tenants/{team.name}/adapters/default"
    (target,) = (await team.get(f"{adapter}/aliases/live")).json()["targets"]
    version = (await team.get(f"{adapter}/versions/{target['version']}")).json()
    digest: str = version["digest"]
    assert digest in team.digests
    return digest


def _wait_until_it_waits(url: str, statement: str) -> None:
    query = sa.text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
        "AND query LIKE :statement"
    ).bindparams(statement=f"{statement}%")
    deadline, is_waiting = time.monotonic() + 60, False
    while not is_waiting:
        assert time.monotonic() < deadline
        with _connected(url) as connection:
            is_waiting = bool(connection.execute(query).scalar_one())


@pytest.mark.parametrize("dialect", ["postgres"])
async def test_an_upgrade_that_has_to_wait_for_a_long_read_holds_up_no_request(
    database_url: str, tmp_path: Path, num_teams: int
) -> None:
    """What waits for a table makes all wait who come after it, and a gateway waits two seconds."""
    migrations = write_next_migrations(tmp_path / "next")
    async with running_world(database_url, tmp_path) as world, at_work(world, num_teams) as fleet:
        await fleet.work_on(1)
        with _connected(database_url) as reader:
            # as pg_dump holds the tables that it copies
            for table in ("adapter", "adapter_version", "alias", "api_key", "request", "tenant", "usage"):
                reader.execute(sa.text(f"LOCK TABLE {table} IN ACCESS SHARE MODE"))
            upgrade = await NextUpgrade.start(migrations, database_url)
            await asyncio.to_thread(_wait_until_it_waits, database_url, "ALTER TABLE")
            await asyncio.sleep(2 * GATEWAYS_PATIENCE_S)
            await fleet.work_on(1)
            assert upgrade.is_running
        assert json.loads(await upgrade.wait())["after"] == FUTURE
        await fleet.work_on(1)


@pytest.mark.parametrize("dialect", ["postgres"])
async def test_an_index_that_is_built_beside_the_writers_holds_up_no_request(
    database_url: str, tmp_path: Path, num_teams: int
) -> None:
    """The page on upgrading shows how; a long read makes it wait, as a large table would."""
    page = (Path(__file__).parents[3] / "docs" / "upgrading.md").read_text()
    block = page.partition("```python\n")[2].partition("```")[0]
    text = f"def upgrade() -> None:\n{textwrap.indent(block, '    ')}"
    migrations = write_next_migrations(tmp_path / "next", text=text)
    async with running_world(database_url, tmp_path) as world, at_work(world, num_teams) as fleet:
        await fleet.work_on(1)
        with _connected(database_url) as reader:
            reader.execute(sa.text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
            reader.execute(sa.text("SELECT count(*) FROM usage"))
            upgrade = await NextUpgrade.start(migrations, database_url)
            await asyncio.to_thread(_wait_until_it_waits, database_url, "CREATE INDEX CONCURRENTLY")
            await asyncio.sleep(2 * GATEWAYS_PATIENCE_S)
            await fleet.work_on(1)
            assert upgrade.is_running
        assert json.loads(await upgrade.wait())["after"] == FUTURE
    with _connected(database_url) as connection:
        query = "SELECT indisvalid FROM pg_index WHERE indexrelid = 'ix_usage_model'::regclass"
        assert connection.execute(sa.text(query)).scalar_one()
