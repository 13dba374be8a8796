"""Schemas that this release cannot run on: each part says which revision it found, which it needs, and what to do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

from doctor_world import look, see
from gateway_world import running_world
from loraplex.cli.app import main
from loraplex.db.database import Database
from loraplex.db.revision import check_revision as check_gateway
from loraplex.doctor.database import check_database
from loraplex.errors import DatabaseRevisionError
from loraplex_registry.app import check_revision, head
from loraplex_registry.db import migration
from loraplex_registry.errors import MigrationError
from loraplex_registry.wire.identity import TokenSigner, generate_signing_key
from next_schema import FUTURE, NextUpgrade, write_next_migrations
from registry_process import build_environ
from support import free_port

SCRIPTS = ScriptDirectory.from_config(migration._config())
PREVIOUS = str(SCRIPTS.get_revision(head()).down_revision)
OLDER = f"The database is at revision {PREVIOUS}, this program needs {head()}; run"
LEFT_BEHIND = f"The database is at revision {FUTURE}, which no longer serves this program, of {head()}; use the release"
PARTS = {"gateway": ["loraplex", "gateway"], "registry": ["loraplex_registry"]}


@pytest.fixture(params=["older", "left behind"])
async def refusal(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> str:
    """What is said of the database, which lacks the last revision, or whose next one broke with this program."""
    if request.param == "older":
        engine = sa.create_engine(database_url.replace("sqlite+aiosqlite", "sqlite"), poolclass=sa.NullPool)
        config = migration._config()
        with engine.connect() as connection:
            config.attributes["connection"] = connection
            command.downgrade(config, PREVIOUS)
            connection.commit()
        return OLDER
    migrations = write_next_migrations(tmp_path / "next", breaks_previous=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migration, "migrations_folder", lambda: migrations)
        assert await asyncio.to_thread(main, ["db", "upgrade", "--url", database_url]) == 0
    return LEFT_BEHIND


async def test_both_checks_name_the_revisions_and_what_to_do(
    database_url: str, refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MigrationError) as of_registry:
        check_revision(database_url)
    database = Database(database_url)
    with pytest.raises(DatabaseRevisionError) as of_gateway:
        await check_gateway(database)
    await database.close()
    assert of_registry.value.message.startswith(refusal)
    assert of_gateway.value.message.startswith(refusal)
    assert ("db upgrade" in of_gateway.value.message) == (refusal == OLDER)
    found = look(check_database, see({"LORAPLEX_DATABASE_URL": database_url}))["database.migrations"]
    assert found.verdict == "fail"
    assert await asyncio.to_thread(main, ["db", "current", "--url", database_url]) == 3
    said = "Run: loraplex db upgrade" if refusal == OLDER else "The database left this program behind"
    assert said in capsys.readouterr().err


@pytest.mark.endure
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_a_part_ends_with_3_and_one_sentence(
    database_url: str, refusal: str, part: str, tmp_path: Path, long: Callable[[float, float], float]
) -> None:
    if (part == "gateway") != (refusal == LEFT_BEHIND) and not long(0, 1):
        pytest.skip("each part and each refusal once; `make endure` crosses them")
    signer = TokenSigner(generate_signing_key())
    environ = build_environ(tmp_path, signer, free_port(), LORAPLEX_DATABASE_URL=database_url)
    if part == "gateway":
        del environ["LORAPLEX_VERIFY_KEYS"]
    argv = [sys.executable, "-P", "-m", *PARTS[part]]
    done = await asyncio.to_thread(subprocess.run, argv, env=environ | {"HOME": str(tmp_path)}, capture_output=True)
    said = done.stderr.decode()
    assert done.returncode == 3, said
    assert refusal in said
    assert "Traceback" not in said


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_a_gateway_that_is_left_behind_while_it_runs_is_ready_no_more(database_url: str, tmp_path: Path) -> None:
    migrations = write_next_migrations(tmp_path / "next", breaks_previous=True)
    async with running_world(database_url, tmp_path) as world:
        assert (await world.call("GET", "/readyz", key=None)).status_code == 200
        await (await NextUpgrade.start(migrations, database_url)).wait()
        answer = await world.call("GET", "/readyz", key=None)
    assert answer.status_code == 503
    assert answer.json()["problem"].startswith(LEFT_BEHIND)
