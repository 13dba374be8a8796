"""Every step of the history moves rows up and down without losing or changing what both sides know."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

from database_rows import insert, insert_all, read_all, version
from loraplex_registry.db import migration

REVISIONS = [script.revision for script in ScriptDirectory.from_config(migration._config()).walk_revisions()]


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


@pytest.mark.parametrize("revision", REVISIONS)
def test_rows_stay_on_the_way_to_the_newest_and_back(empty_database_url: str, revision: str) -> None:
    engine = sa.create_engine(empty_database_url.replace("sqlite+aiosqlite", "sqlite"), poolclass=sa.NullPool)
    with engine.connect() as connection:
        _move(connection, revision, up=True)
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
        _move(connection, "head", up=True)


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
