"""The database: whether it answers, how fast, at which revision, and what this user may do there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import sqlalchemy as sa

from loraplex.db.database import check_database_url
from loraplex.doctor.finding import Finding, judge_clock, judge_latency
from loraplex.doctor.patient import Patient

_OLDEST_POSTGRES, _OLDEST_SQLITE = 130_000, (3, 37, 0)
_NUM_PINGS = 5
_SKEW_WARN_S, _SKEW_FAIL_S = 2.0, 30.0
_OWN_CONNECTIONS = 3
"""What a gateway opens beside its two pools: the claim, its duties, a migration."""

_START = "loraplex db upgrade"


def check_database(patient: Patient) -> Iterator[Finding]:
    """Look at the database of the settings."""
    url = patient.value("LORAPLEX_DATABASE_URL")
    if url is None:
        yield Finding("database.reachable", "skip", f"Nothing says where the database of {patient.part} is.")
        return
    parsed = check_database_url(url)
    if parsed.get_backend_name() == "sqlite":
        if parsed.database and not Path(parsed.database).exists():
            yield Finding(
                "database.reachable", "skip", f"{parsed.database} is not there yet; the first start makes it."
            )
            return
        yield from _check_sqlite(patient, parsed)
    else:
        yield from _check_postgres(patient, parsed)


def _check_sqlite(patient: Patient, url: sa.URL) -> Iterator[Finding]:
    path = Path(url.database or "")
    engine = sa.create_engine(url.set(drivername="sqlite"), poolclass=sa.NullPool, connect_args={"timeout": 2.0})
    sa.event.listen(engine, "connect", _take_transactions)
    own = f"Let {path} and its folder belong to the user who runs this, on a writable file system."
    try:
        with engine.connect() as connection:
            version = tuple(int(number) for number in connection.scalar(sa.text("SELECT sqlite_version()")).split("."))
            damage = connection.scalar(sa.text("PRAGMA quick_check(1)"))
            yield Finding("database.reachable", "ok", f"{path} opens.")
            yield _judge_version("SQLite", ".".join(map(str, version)), is_new=version >= _OLDEST_SQLITE, oldest="3.37")
            if damage != "ok":
                why = f"The file is damaged: {damage}."
                yield Finding("database.whole", "fail", why, "Stop the platform and restore a backup.")
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.exec_driver_sql("ROLLBACK")
            yield Finding("database.permissions", "ok", "It can be written.")
    except sa.exc.DatabaseError as error:
        text = str(error.orig)
        if "locked" in text:
            yield Finding(
                "database.permissions", "warn", "Another program holds it for longer than 2 s.", "Look for it."
            )
        else:
            yield Finding("database.permissions", "fail", f"{path} cannot be used: {text}.", own)
            return
    finally:
        engine.dispose()
    yield _check_migrations(patient, url)


def _check_postgres(patient: Patient, url: sa.URL) -> Iterator[Finding]:
    engine = sa.create_engine(
        url, poolclass=sa.NullPool, connect_args={"connect_timeout": max(2, int(patient.limit_s / 2))}
    )
    try:
        with engine.connect() as connection:
            yield Finding("database.reachable", "ok", f"Postgres at {url.host or 'its socket'} lets {url.username} in.")
            yield from _look_at_postgres(connection, int(patient.value("LORAPLEX_DATABASE_POOL_SIZE") or 8))
    except sa.exc.OperationalError as error:
        text = " ".join(str(error.orig).split())
        yield Finding("database.reachable", "fail", f"Postgres does not let this machine in: {text}", _advise(text))
        return
    finally:
        engine.dispose()
    yield _check_migrations(patient, url)


def _look_at_postgres(connection: sa.Connection, pool_size: int) -> Iterator[Finding]:
    number = int(connection.scalar(sa.text("SELECT current_setting('server_version_num')")) or 0)
    name = str(connection.scalar(sa.text("SELECT current_setting('server_version')")))
    yield _judge_version("Postgres", name, is_new=number >= _OLDEST_POSTGRES, oldest="13")
    times = []
    for _ in range(_NUM_PINGS):
        began_at = time.perf_counter()
        connection.scalar(sa.text("SELECT 1"))
        times.append(time.perf_counter() - began_at)
    slow = "Bring gateways and database closer together: each call takes several round trips."
    yield judge_latency("database.latency", statistics.median(times), slow)
    before = datetime.now(UTC)
    theirs: datetime = connection.scalar(sa.text("SELECT clock_timestamp()"))
    middle = before + (datetime.now(UTC) - before) / 2
    yield judge_clock(
        "database.clock",
        (theirs - middle).total_seconds(),
        whose="The database's clock",
        warn_s=_SKEW_WARN_S,
        fail_s=_SKEW_FAIL_S,
        why="times in usage and audit disagree",
    )
    yield _check_permissions(connection)
    yield _check_room(connection, pool_size)


def _check_permissions(connection: sa.Connection) -> Finding:
    """Rows of every table, and tables too where this user migrates."""
    denied = connection.scalars(
        sa.text(
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = current_schema() AND c.relkind = 'r' AND NOT (has_table_privilege(c.oid, 'SELECT') "
            "AND has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'UPDATE') "
            "AND has_table_privilege(c.oid, 'DELETE')) ORDER BY 1"
        )
    ).all()
    if denied:
        return Finding(
            "database.permissions",
            "fail",
            f"This user may not read and write {len(denied)} tables, {denied[0]} among them.",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA ... TO this user, or migrate as this user.",
        )
    can_create = connection.scalar(sa.text("SELECT has_schema_privilege(current_schema(), 'CREATE')"))
    if not can_create:
        return Finding(
            "database.permissions",
            "warn",
            "This user may read and write all tables, but make none.",
            f"That is enough to serve; run `{_START}` as a user who may.",
        )
    return Finding("database.permissions", "ok", "This user may read and write all tables, and make new ones.")


def _check_room(connection: sa.Connection, pool_size: int) -> Finding:
    used = int(
        connection.scalar(sa.text("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"))
    )
    most = int(connection.scalar(sa.text("SELECT current_setting('max_connections')::int")) or 0)
    wanted = 2 * pool_size + _OWN_CONNECTIONS
    shown = f"{used} of {most} connections are used; a gateway takes up to {wanted}."
    if most - used >= wanted:
        return Finding("database.connections", "ok", shown)
    return Finding(
        "database.connections", "warn", shown, "Raise max_connections, or lower LORAPLEX_DATABASE_POOL_SIZE."
    )


def _check_migrations(patient: Patient, url: sa.URL) -> Finding:
    door, text = patient.door, url.render_as_string(hide_password=False)
    found, needed = door.current(text), door.head()
    if found == needed:
        return Finding("database.migrations", "ok", f"The database is at this program's revision, {needed}.")
    if found is not None and not door.knows_revision(found):
        message = f"The database is at {found}, ahead of this program's {needed}"
        if door.serves(text):
            return Finding("database.migrations", "ok", f"{message}, and still serves it.")
        remedy = "Upgrade this program to the version that migrated it."
        return Finding("database.migrations", "fail", f"{message}, and no longer serves it.", remedy)
    message = f"The database is at {found or 'no revision'}, behind this program's {needed}."
    return Finding("database.migrations", "fail", message, f"Run: {_START}")


def _judge_version(name: str, version: str, *, is_new: bool, oldest: str) -> Finding:
    if is_new:
        return Finding("database.version", "ok", f"{name} {version}.")
    return Finding("database.version", "fail", f"{name} {version} is too old.", f"Use {name} {oldest} or newer.")


def _advise(text: str) -> str:
    if "password" in text or "authentication" in text or "pg_hba" in text:
        return "Check user and password in LORAPLEX_DATABASE_URL, and the server's pg_hba.conf."
    if 'role "' in text and "does not exist" in text:
        return "Check user and password in LORAPLEX_DATABASE_URL: the server knows no such user."
    if "does not exist" in text:
        return f"Create the database, then run: {_START}"
    return "Check host and port in LORAPLEX_DATABASE_URL, the network, and that the server runs."


def _take_transactions(connection: object, record: object) -> None:  # noqa: ARG001 - the event passes both
    connection.isolation_level = None  # type: ignore[attr-defined]
