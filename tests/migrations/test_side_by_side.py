"""Releases N and N+1 on one database: what a migration may do, and this program on a schema that is ahead of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command, op
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory

from database_rows import insert_all
from loraplex.cli.app import main
from loraplex.db.database import Database
from loraplex.db.revision import check_revision as check_gateway
from loraplex_registry.app import check_revision, current, head, serves, upgrade
from loraplex_registry.db import migration
from loraplex_registry.errors import MigrationError
from next_schema import EXPANDING, FUTURE, write_next_migrations
from schema_change import find_losses, read_schema

FIRST_RELEASE = "0012_quota_debts"
"""The schema of 0.1.0. What came before served nobody who had a release before it."""

SCRIPTS = [*reversed(list(ScriptDirectory.from_config(migration._config()).walk_revisions()))]
RELEASED = SCRIPTS[[script.revision for script in SCRIPTS].index(FIRST_RELEASE) + 1 :]


@contextmanager
def _connected(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url.replace("sqlite+aiosqlite", "sqlite"), poolclass=sa.NullPool)
    with engine.connect() as connection:
        yield connection


def _move(connection: sa.Connection, revision: str) -> None:
    config = migration._config()
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
    connection.commit()


def test_every_migration_since_the_first_release_only_adds_or_says_why(empty_database_url: str) -> None:
    with _connected(empty_database_url) as connection:
        _move(connection, FIRST_RELEASE)
        for script in RELEASED:
            before = read_schema(connection)
            _move(connection, script.revision)
            losses = list(find_losses(before, read_schema(connection)))
            _check_declared(script.module, losses)


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_a_real_migration_that_is_stricter_is_seen(empty_database_url: str) -> None:
    """0006 came before the first release; today it would have to be a contraction."""
    with _connected(empty_database_url) as connection:
        _move(connection, "0005_gate_and_uploads")
        before = read_schema(connection)
        _move(connection, "0006_rules_in_the_database")
        losses = list(find_losses(before, read_schema(connection)))
    assert any("alias has a new rule for rows: CHECK revision >= 1" in loss for loss in losses)
    assert any("guard_alias_history_update is stricter" in loss for loss in losses)
    assert not any("request" in loss and "gateway" in loss for loss in losses), "a new column that may be left out"


def _check_declared(module: ModuleType, losses: list[str]) -> None:
    """A migration that takes something is the contract half of a change, names why, and shuts older programs out."""
    reason = getattr(module, "contract_reason", "")
    is_contract = bool(getattr(module, "breaks_previous", False))
    assert is_contract == bool(losses), f"{module.__name__}: breaks_previous is {is_contract}, and it takes: {losses}"
    assert is_contract == bool(reason), f"{module.__name__}: say in contract_reason why nobody needs it: {losses}"


def _operations(connection: sa.Connection) -> Operations:
    return Operations(MigrationContext.configure(connection))


def _alter(table: str, act: Callable[[Any], None]) -> Callable[[Operations], None]:
    def run(operations: Operations) -> None:
        with operations.batch_alter_table(table) as batch:
            act(batch)

    return run


def _hold_keys(operations: Operations) -> None:
    operations.create_table("future", sa.Column("key", sa.Uuid(), sa.ForeignKey("api_key.id")))


TAKING: dict[str, tuple[Callable[[Operations], None], str]] = {
    "drop a table": (lambda run: run.drop_table("quota_debt"), "table quota_debt is gone"),
    "drop a column": (
        lambda run: run.execute(sa.text("ALTER TABLE tenant DROP COLUMN display_name")),
        r"tenant\.display_name is gone",
    ),
    "rename a table": (lambda run: run.rename_table("quota_debt", "debt"), "table quota_debt is gone"),
    "rename a column": (
        lambda run: run.execute(sa.text("ALTER TABLE quota_debt RENAME COLUMN owed TO due")),
        r"quota_debt\.owed is gone",
    ),
    "narrow a type": (
        _alter("quota_debt", lambda batch: batch.alter_column("quota", type_=sa.String(8))),
        r"quota is VARCHAR\(8\), and was VARCHAR\(120\)",
    ),
    "forbid NULL": (
        _alter("tenant", lambda batch: batch.alter_column("display_name", nullable=False)),
        "display_name takes no NULL",
    ),
    "need a new column": (
        _alter("quota_debt", lambda batch: batch.add_column(sa.Column("unit", sa.String(8), nullable=False))),
        "unit is new and must be given",
    ),
    "a rule on old columns": (
        _alter("quota_debt", lambda batch: batch.create_check_constraint("low", "owed < 9")),
        "new rule for rows: CHECK owed < 9",
    ),
    "a unique index": (
        lambda run: run.create_index("uq_owed", "quota_debt", ["owed"], unique=True),
        "new rule for rows: UNIQUE",
    ),
    "hold an old table's rows": (_hold_keys, "future holds rows of api_key"),
    "drop a view": (lambda run: run.execute(sa.text("DROP VIEW audit_event")), "view audit_event is gone"),
}


@pytest.mark.parametrize("act", TAKING)
@pytest.mark.parametrize("dialect", ["sqlite"])
def test_what_takes_something_from_older_programs_is_found(database_url: str, act: str) -> None:
    do, expected = TAKING[act]
    with _connected(database_url) as connection:
        before = read_schema(connection)
        do(_operations(connection))
        losses = list(find_losses(before, read_schema(connection)))
    assert re.search(expected, "; ".join(losses))


def test_what_only_adds_takes_nothing(database_url: str) -> None:
    with _connected(database_url) as connection:
        before = read_schema(connection)
        with Operations.context(MigrationContext.configure(connection)):
            namespace: dict[str, Any] = {"op": op, "sa": sa}
            exec(EXPANDING, namespace)
            namespace["upgrade"]()
        assert list(find_losses(before, read_schema(connection))) == []


def test_a_contract_has_to_be_declared() -> None:
    module = ModuleType("m")
    module.breaks_previous = False  # type: ignore[attr-defined]
    _check_declared(module, [])
    with pytest.raises(AssertionError, match="table x is gone"):
        _check_declared(module, ["table x is gone"])
    module.breaks_previous = True  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="contract_reason"):
        _check_declared(module, ["table x is gone"])
    module.contract_reason = "0.2.0 reads y; 0.1.0 is out of support"  # type: ignore[attr-defined]
    _check_declared(module, ["table x is gone"])
    with pytest.raises(AssertionError, match="it takes: "):
        _check_declared(module, [])


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bool], None]:
    """Upgrades a database as the next release would; then this program is the old one again."""

    def run(url: str, breaks_previous: bool) -> None:
        folder = write_next_migrations(tmp_path / f"next-{breaks_previous}", breaks_previous=breaks_previous)
        with monkeypatch.context() as patch:
            patch.setattr(migration, "migrations_folder", lambda: folder)
            assert upgrade(url).after == FUTURE

    return run


async def test_this_program_runs_on_the_next_schema_that_only_adds(
    database_url: str, next_release: Callable[[str, bool], None], capsys: pytest.CaptureFixture[str]
) -> None:
    next_release(database_url, False)
    assert current(database_url) == FUTURE
    check_revision(database_url)
    database = Database(database_url)
    await check_gateway(database)
    await database.close()
    with _connected(database_url) as connection:
        # the rows of this program, which knows nothing of the new columns
        insert_all(connection)
        connection.commit()
    done = upgrade(database_url)
    assert (done.before, done.after, done.is_changed) == (FUTURE, FUTURE, False)
    assert main(["db", "current", "--json", "--url", database_url]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"current": FUTURE, "head": head(), "is_current": False, "is_served": True}
    assert main(["db", "upgrade", "--url", database_url]) == 0
    assert "which it serves; nothing to do" in capsys.readouterr().err


def test_this_program_does_not_run_on_a_schema_that_left_it_behind(
    database_url: str, next_release: Callable[[str, bool], None], capsys: pytest.CaptureFixture[str]
) -> None:
    next_release(database_url, True)
    assert not serves(database_url)
    with pytest.raises(MigrationError, match=FUTURE):
        check_revision(database_url)
    with pytest.raises(MigrationError, match="newer than this program"):
        upgrade(database_url)
    assert main(["db", "current", "--url", database_url]) == 3
    assert "left this program behind" in capsys.readouterr().err
