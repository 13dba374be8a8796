"""The database helper: a database per test, gone afterwards, also on a server that the run starts itself."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.sql import text

import databases


async def test_each_test_gets_an_empty_writable_database(empty_database_url: str) -> None:
    engine = create_async_engine(empty_database_url)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE only_here (id INTEGER)"))
        await connection.execute(text("INSERT INTO only_here VALUES (1)"))
        assert (await connection.execute(text("SELECT count(*) FROM only_here"))).scalar_one() == 1
    await engine.dispose()


def test_a_clone_holds_what_its_template_held(postgres_server: databases.PostgresServer) -> None:
    template = postgres_server.create()
    with psycopg.connect(_plain(postgres_server.url(template)), autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (id INTEGER)")
    clone = postgres_server.create(template)
    with psycopg.connect(_plain(postgres_server.url(clone)), autocommit=True) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)
    for name in (clone, template):
        postgres_server.drop(name)


def test_a_server_is_started_from_the_wheel_where_none_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAPLEX_TEST_PG", raising=False)
    monkeypatch.setattr(databases, "LOCAL_URL", "postgresql://postgres@127.0.0.1:1/postgres")
    with databases.running_postgres() as server:
        url = _plain(server.url(server.create()))
        psycopg.connect(url).close()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url, connect_timeout=2)


def test_a_named_server_that_does_not_answer_is_never_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_TEST_PG", "postgresql://postgres@127.0.0.1:1/postgres")
    with pytest.raises(databases.Unavailable, match="LORAPLEX_TEST_PG is set"), databases.running_postgres():
        pass


def _plain(url: str) -> str:
    return url.replace("+psycopg", "")
