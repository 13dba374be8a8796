"""Moves a database to the newest revision, and says which programs a database serves.

Only `upgrade` migrates: under a lock, and after copying a SQLite file. Blocking: run it before the event loop, or in a
thread. The history itself lies in `migrations/`, for all parts.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from loraplex_registry.errors import MigrationError, SettingError, UnavailableError

_LOCK_ID = 0x10_7A_91_EC
_LOCK_TIMEOUT_S = 60.0
_TABLE_PATIENCE_MS = 500
"""How long a step waits for a table that is in use. Whoever waits for one makes all wait that come later, and a part
that serves waits two seconds at most; after one, Postgres looks for deadlocks, and might choose the part as victim."""

_PAUSE_S = 1.0
"""Between two tries: what has queued up behind the first runs meanwhile."""

_TABLE_IN_USE = ("55P03", "40P01")
_COMMAND = "loraplex db upgrade"


@dataclass(frozen=True)
class Upgrade:
    """What `upgrade` did: the revisions before and after, and the copy of a SQLite file made before."""

    before: str | None
    after: str
    copy: Path | None

    @property
    def is_changed(self) -> bool:
        """Whether there was anything to do."""
        return self.before != self.after


def upgrade(url: str) -> Upgrade:
    """Bring the database at `url` to the newest revision, one program at a time.

    A newer one that serves this program still stays as it is, so that a roll-back finds nothing to do.

    Raises:
        MigrationError: Another program holds the lock, or a table, too long, or the database has left this program
            behind.
        UnavailableError: The database does not answer.
    """
    config, path = _config(), _sqlite_path(url)
    if path is not None:
        _create_private(path)
    with _locked_file(path), _connect(url) as connection, _locked_postgres(connection):
        before, after = _current(connection), head()
        if before != after and after in _list_served(connection):
            return Upgrade(before, str(before), None)
        _check_known(config, before)
        copy = _copy_sqlite(path, before) if path is not None and before not in (None, after) else None
        config.attributes["connection"] = connection
        _run(config, connection)
    return Upgrade(before, after, copy)


def _run(config: Config, connection: sa.Connection) -> None:
    """Run what is missing, all of it or nothing; where a table is in use, again a while later."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        connection.rollback()
        try:
            command.upgrade(config, "head")
            connection.commit()
        except sa.exc.OperationalError as error:
            connection.rollback()
            if getattr(error.orig, "sqlstate", None) not in _TABLE_IN_USE:
                raise
            if time.monotonic() > deadline:
                raise MigrationError(
                    f"A table was in use for {_LOCK_TIMEOUT_S:.0f} seconds, by a long read such as pg_dump; nothing "
                    f"has changed. Wait for its end and run {_COMMAND} again"
                ) from error
        else:
            return
        time.sleep(_PAUSE_S)


def current(url: str) -> str | None:
    """Return the revision of the database at `url`, None if it was never migrated.

    Raises:
        UnavailableError: The database does not answer.
    """
    path = _sqlite_path(url)
    if path is not None and not path.exists():
        return None
    with _connect(url) as connection:
        return _current(connection)


def check_revision(url: str) -> None:
    """Return if this program may run on the database at `url`: it is at our revision, or at one that still serves us.

    Raises:
        MigrationError: It is older, or newer and not marked compatible; the message has the command to run.
        UnavailableError: The database does not answer.
    """
    found, needed = current(url), head()
    if found == needed:
        return
    if found is not None and serves(url):
        return
    if found is not None and not knows_revision(found):
        raise MigrationError(
            f"The database is at revision {found}, which no longer serves this program, of {needed}; use the release "
            "that migrated it, or a newer one"
        )
    raise MigrationError(f"The database is at revision {found or 'none'}, this program needs {needed}; run {_COMMAND}")


def serves(url: str) -> bool:
    """Say whether this program may run on the database at `url`, which may be newer than it.

    Raises:
        UnavailableError: The database does not answer.
    """
    path = _sqlite_path(url)
    if path is not None and not path.exists():
        return False
    with _connect(url) as connection:
        return head() in _list_served(connection)


def head() -> str:
    """Return the newest revision that this program brings."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None, "there is one history"
    return revision


def knows_revision(revision: str) -> bool:
    """Say whether this program brings that revision, so that it can lead a database on from there."""
    return revision in _list_known(_config())


def migrations_folder() -> Path:
    """Return the folder of the history: inside the installed package, else in the source tree."""
    package = importlib.util.find_spec("loraplex")
    installed = Path(package.origin).with_name("_migrations") if package and package.origin else None
    if installed is not None and installed.is_dir():
        return installed
    return Path(__file__).resolve().parents[3] / "migrations"


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    return config


def _list_known(config: Config) -> set[str]:
    return {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}


def _check_known(config: Config, revision: str | None) -> None:
    if revision is not None and revision not in _list_known(config):
        raise MigrationError(f"The database is at revision {revision}, newer than this program; upgrade the program")


@contextlib.contextmanager
def _connect(url: str) -> Iterator[sa.Connection]:
    try:
        engine = sa.create_engine(url.replace("sqlite+aiosqlite://", "sqlite://"), poolclass=sa.NullPool)
    except sa.exc.ArgumentError as error:
        raise SettingError("LORAPLEX_DATABASE_URL is not a database URL") from error
    try:
        with engine.connect() as connection:
            yield connection
    except sa.exc.OperationalError as error:
        raise UnavailableError(f"The database does not answer: {error.orig}") from error
    finally:
        engine.dispose()


def _current(connection: sa.Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _list_served(connection: sa.Connection) -> set[str]:
    """The programs that the schema serves, by the newest revision that they know."""
    if not sa.inspect(connection).has_table("compatible_revision"):
        return set()
    return set(connection.execute(sa.text("SELECT revision FROM compatible_revision")).scalars())


def _sqlite_path(url: str) -> Path | None:
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise SettingError("LORAPLEX_DATABASE_URL is not a database URL") from error
    return Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None


def _create_private(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _copy_sqlite(path: Path, revision: str | None) -> Path:
    """Copy a consistent state, write-ahead log included, to a name that says what it is."""
    copy = path.with_name(f"{path.name}.{revision}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.bak")
    _create_private(copy)
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


@contextlib.contextmanager
def _locked_file(path: Path | None) -> Iterator[None]:
    """Hold the lock beside a SQLite file; it goes with its process."""
    if path is None:
        yield
        return
    lock = path.with_name(f"{path.name}.lock")
    _create_private(lock)
    with lock.open("wb") as file:
        _wait_for_lock(file.fileno())
        yield


def _wait_for_lock(descriptor: int) -> None:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise MigrationError("another program is migrating this database; wait for it") from error
            time.sleep(0.1)
        else:
            return


@contextlib.contextmanager
def _locked_postgres(connection: sa.Connection) -> Iterator[None]:
    """Hold an advisory lock of the session, on Postgres."""
    if connection.dialect.name != "postgresql":
        yield
        return
    connection.execute(sa.text(f"SET lock_timeout = '{int(_LOCK_TIMEOUT_S)}s'"))
    connection.execute(sa.text("SELECT pg_advisory_lock(:id)"), {"id": _LOCK_ID})
    connection.execute(sa.text(f"SET lock_timeout = '{_TABLE_PATIENCE_MS}ms'"))
    connection.commit()
    yield
