"""What `loraplex up` says where the database cannot be brought to this program's revision."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
from pathlib import Path

import pytest

from loraplex.supervisor.errors import UpError
from loraplex.supervisor.migration import migrate


async def test_a_database_that_is_down_is_one_sentence_and_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    env = {"HOME": str(tmp_path), "LORAPLEX_DATABASE_URL": f"postgresql+psycopg://u:p@127.0.0.1:{port}/x"}
    with pytest.raises(UpError) as caught:
        await migrate(env)
    assert caught.value.message == (
        f'The database does not answer: connection failed: connection to server at "127.0.0.1", port {port} failed: '
        "Connection refused. Start the database, or correct LORAPLEX_DATABASE_URL; `loraplex doctor` looks closer."
    )


async def test_another_refusal_is_its_own_sentence(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "loraplex.db")) as old, old:
        old.execute("CREATE TABLE alembic_version (version_num TEXT)")
        old.execute("INSERT INTO alembic_version VALUES ('9999_future')")
    with pytest.raises(UpError, match=r"^The database could not be upgraded: .*9999_future.*[.]$"):
        await migrate({"HOME": str(tmp_path), "LORAPLEX_DATA_DIR": str(tmp_path)})


async def test_a_file_that_cannot_be_a_database_names_where_it_is_set(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "LORAPLEX_DATABASE_URL": f"sqlite+aiosqlite:///{tmp_path}"}
    with pytest.raises(UpError, match="LORAPLEX_DATABASE_URL or the data folder"):
        await migrate(env)


async def test_a_fault_of_the_command_is_shown_whole(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import loraplex_registry.db.migration as migration\ndel migration.upgrade\n"
    )
    env = {"HOME": str(tmp_path), "PYTHONPATH": str(tmp_path), "LORAPLEX_DATA_DIR": str(tmp_path)}
    with pytest.raises(UpError, match=r"(?s)could not be upgraded:.*ImportError"):
        await migrate(env)
