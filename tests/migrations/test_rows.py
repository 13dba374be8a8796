"""Every step of the history moves rows up and down without losing or changing what both sides know."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

from database_rows import insert, insert_all, read_all, version
from databases import PostgresServer
from loraplex_registry.db import migration

REVISIONS = [script.revision for script in ScriptDirectory.from_config(migration._config()).walk_revisions()][::-1]


def _move(connection: sa.Connection, revision: str, *, up: bool) -> None:
    config = migration._config()
    config.attributes["connection"] = connection
    (command.upgrade if up else command.downgrade)(config, revision)
    connection.commit()


def _shared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What of `after` is in tables and columns that `before` has."""
    return {
        table: [{name: row[name] for name in old[0]} for row in after[table]] if old else after[table]
        for table, old in before.items()
    }


class _Way:
    """Databases without rows at each revision: each is a copy of the one before, a step further."""

    def __init__(self, request: pytest.FixtureRequest, folder: Path) -> None:
        self._request, self._folder = request, folder
        self._files: dict[str, Path] = {}
        self._names: dict[str, str] = {}

    @property
    def _server(self) -> PostgresServer:
        server: PostgresServer = self._request.getfixturevalue("postgres_server")
        return server

    def copy_sqlite(self, revision: str | None, to: Path) -> str:
        if revision is not None:
            if revision not in self._files:
                self._files[revision] = self._folder / f"{revision}.db"
                _step(self.copy_sqlite(_before(revision), self._files[revision]), revision)
            shutil.copyfile(self._files[revision], to)
        return f"sqlite:///{to}"

    def copy_postgres(self, revision: str | None) -> str:
        if revision is not None and revision not in self._names:
            self._names[revision] = self.copy_postgres(_before(revision))
            _step(self._server.url(self._names[revision]), revision)
        return self._server.create(None if revision is None else self._names[revision])

    def end(self) -> None:
        for name in self._names.values():
            self._server.drop(name)


def _before(revision: str) -> str | None:
    place = REVISIONS.index(revision)
    return REVISIONS[place - 1] if place else None


def _step(url: str, revision: str) -> None:
    with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
        _move(connection, revision, up=True)


@pytest.fixture(scope="module")
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Way]:
    made = _Way(request, tmp_path_factory.mktemp("way"))
    yield made
    made.end()


@pytest.fixture(params=REVISIONS)
def revision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(request: pytest.FixtureRequest, way: _Way, dialect: str, revision: str, tmp_path: Path) -> Iterator[str]:
    """A database of this test alone, at the revision."""
    if dialect == "sqlite":
        yield way.copy_sqlite(revision, tmp_path / "rows.db")
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = way.copy_postgres(revision)
    yield server.url(name)
    server.drop(name)


@pytest.mark.endure
def test_rows_stay_on_the_way_to_the_newest_and_back(
    url: str, revision: str, long: Callable[[float, float], float]
) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        insert_all(connection)
        connection.commit()
        there = read_all(connection)
        assert all(there.values()), "each table has a row"
        _move(connection, "head", up=True)
        newest = read_all(connection)
        mended = _shared(there, newest)
        if revision < "0003":
            # a quarantine without a reason is none that a program wrote
            for row in mended.get("adapter_version", []):
                row.pop("quarantine", None)
        assert mended == there
        _move(connection, revision, up=False)
        assert read_all(connection) == there
        if revision in REVISIONS[: int(long(1, len(REVISIONS)))]:
            # from the oldest each step has been taken back
            _move(connection, "head", up=True)
            assert _shared(there, read_all(connection)) == _shared(there, newest)


def test_what_waits_for_the_gate_is_ready_for_a_program_without_one(database_url: str) -> None:
    engine = sa.create_engine(database_url.replace("sqlite+aiosqlite", "sqlite"), poolclass=sa.NullPool)
    with engine.connect() as connection:
        insert_all(connection)
        insert(connection, "adapter_version", version(5, "validating", pending="{}"))
        connection.commit()
        _move(connection, "0004_matrix_hashes", up=False)
        states = connection.execute(sa.text("SELECT state FROM adapter_version WHERE number = 5")).scalars().all()
        assert states == ["ready"]
        connection.commit()
        _move(connection, "head", up=True)
