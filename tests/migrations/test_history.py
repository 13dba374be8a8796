"""The one history of the schema: it makes what the models say, on both databases, there and back."""

from __future__ import annotations

import sqlite3
import stat
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from loraplex.db.revision import REVISION
from loraplex.db.tables import metadata as gateway_metadata
from loraplex_registry.app import check_revision, current, head, upgrade
from loraplex_registry.db import migration
from loraplex_registry.db.model import METADATA
from loraplex_registry.errors import MigrationError, SettingError


def _engine(url: str) -> sa.Engine:
    return sa.create_engine(url.replace("sqlite+aiosqlite", "sqlite"), poolclass=sa.NullPool)


def test_history_is_one_line() -> None:
    scripts = ScriptDirectory.from_config(migration._config())
    assert len(scripts.get_heads()) == 1
    assert [script.revision for script in reversed(list(scripts.walk_revisions()))][:2] == [
        "0001_registry",
        "0002_gateway",
    ]


def test_names_of_revisions_grow() -> None:
    """By them a gateway tells a database that is ahead from one that is behind."""
    scripts = ScriptDirectory.from_config(migration._config())
    names = [script.revision for script in reversed(list(scripts.walk_revisions()))]
    assert names == sorted(names)
    assert [int(name.partition("_")[0]) for name in names] == [*range(1, len(names) + 1)]


def test_the_gateway_needs_the_newest_revision() -> None:
    assert head() == REVISION


def test_upgraded_database_is_what_the_models_say(database_url: str) -> None:
    engine = _engine(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={"include_object": lambda item, name, kind, *_: name != "compatible_revision", "compare_type": True},
        )
        assert compare_metadata(context, [METADATA, gateway_metadata]) == []  # type: ignore[arg-type]


def _list_checks(connection: sa.Connection) -> dict[str, set[str | None]]:
    tables = {*METADATA.tables, *gateway_metadata.tables}
    inspector = sa.inspect(connection)
    return {table: {check["name"] for check in inspector.get_check_constraints(table)} for table in tables}


def test_upgraded_database_has_the_checks_of_the_models(database_url: str, empty_database_url: str) -> None:
    with _engine(empty_database_url).begin() as connection:
        for metadata in (METADATA, gateway_metadata):
            metadata.create_all(connection)
        expected = _list_checks(connection)
    with _engine(database_url).connect() as connection:
        assert _list_checks(connection) == expected
    assert sum(map(len, expected.values())) > 50


def test_alembic_has_nothing_to_add(database_url: str) -> None:
    from alembic import command

    config = migration._config()
    with _engine(database_url).connect() as connection:
        config.attributes["connection"] = connection
        command.check(config)


def test_upgrade_then_check_then_nothing_to_do(empty_database_url: str) -> None:
    assert current(empty_database_url) is None
    with pytest.raises(MigrationError, match="loraplex db upgrade"):
        check_revision(empty_database_url)
    done = upgrade(empty_database_url)
    assert (done.before, done.after, done.copy, done.is_changed) == (None, head(), None, True)
    check_revision(empty_database_url)
    assert not upgrade(empty_database_url).is_changed
    assert current(empty_database_url) == head()


def test_downgrade_leaves_nothing(empty_database_url: str) -> None:
    from alembic import command

    upgrade(empty_database_url)
    engine = _engine(empty_database_url)
    config = migration._config()
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
        connection.commit()
        assert set(sa.inspect(connection).get_table_names()) == {"alembic_version"}
    upgrade(empty_database_url)


def test_concurrent_upgrades_follow_one_another(empty_database_url: str) -> None:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(upgrade(empty_database_url).is_changed)
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, results)) == ["False", "False", "True"]


def _pretend(url: str, revision: str, compatible: list[str]) -> None:
    engine = _engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
        connection.execute(sa.text("DELETE FROM compatible_revision"))
        for each in compatible:
            connection.execute(sa.text("INSERT INTO compatible_revision VALUES (:each)"), {"each": each})


def test_newer_database_serves_us_only_if_it_says_so(database_url: str) -> None:
    _pretend(database_url, "0099_future", [head(), "0099_future"])
    check_revision(database_url)
    _pretend(database_url, "0099_future", ["0099_future"])
    with pytest.raises(MigrationError, match="0099_future"):
        check_revision(database_url)
    with pytest.raises(MigrationError, match="newer than this program"):
        upgrade(database_url)


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_sqlite_file_is_private_and_copied_before_it_changes(empty_database_url: str, tmp_path: Path) -> None:
    upgrade(empty_database_url)
    file = tmp_path / "empty.db"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    from alembic import command

    config = migration._config()
    with _engine(empty_database_url).connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001_registry")
        connection.commit()
    done = upgrade(empty_database_url)
    assert done.copy is not None
    assert stat.S_IMODE(done.copy.stat().st_mode) == 0o600
    copy = sqlite3.connect(done.copy)
    assert copy.execute("SELECT version_num FROM alembic_version").fetchall() == [("0001_registry",)]
    copy.close()


@pytest.mark.parametrize("url", ["nonsense", "mysql+pymysql://x/y"])
def test_other_databases_are_refused(url: str) -> None:
    from loraplex_registry.db.database import create_engine

    with pytest.raises(SettingError, match="LORAPLEX_DATABASE_URL"):
        create_engine(url)
