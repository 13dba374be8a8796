"""Fixtures of all tests: where sockets are allowed, databases on both dialects, tiny bases, the real small base, sizes.

Sockets are off (pytest-socket) except in folders that exist to use them. Settings of the caller's shell never reach a
test, apart from LORAPLEX_TEST_*, LORAPLEX_CACHE_DIR and LORAPLEX_NATIVE.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from alembic import command
from alembic.config import Config
from hypothesis import HealthCheck, settings

import dialect_turns
import folder_scheduling
import once
import pairs
import second_try
from databases import PostgresServer, Unavailable, running_postgres
from redis_world import RedisServer, RedisUnavailable, running_redis
from s3_world import S3Server, S3Unavailable, running_s3
from support import tiny_llama_config, tiny_qwen2_config, tiny_tied_config, write_base

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
_KEPT_SETTINGS = ("LORAPLEX_CACHE_DIR", "LORAPLEX_NATIVE")

for _name in [name for name in os.environ if name.startswith("LORAPLEX_")]:
    if not _name.startswith("LORAPLEX_TEST_") and _name not in _KEPT_SETTINGS:
        del os.environ[_name]
# Each of several processes of a run is told of a terminal, which tables that are piped would follow.
os.environ.pop("COLUMNS", None)
# A test never waits for a hub, and tokenizers must not warn when a test forks.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tests run side by side: threads that wait for one another at barriers would all wait for a core.
os.environ["OMP_NUM_THREADS"] = os.environ["LORAPLEX_ENGINE_CPU_THREADS"] = "1"
# The same examples in every run, however slow the machine is; `make endure` looks for others.
settings.register_profile(
    "suite",
    max_examples=50,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("endure", parent=settings.get_profile("suite"), max_examples=1000, derandomize=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make endure` ask for long cases at full length, and `make test` for a second try of what failed."""
    second_try.pytest_addoption(parser)
    parser.addoption("--endure", action="store_true", help="run the cases marked `endure` at full length")
    parser.addoption("--shots", type=Path, help="a folder for pictures of every page that tests of the dashboard see")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples property tests try."""
    once.remember()
    second_try.pytest_configure(config)
    config.pluginmanager.register(folder_scheduling)
    settings.load_profile("endure" if config.getoption("--endure") else "suite")


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what lives as long as the run, ten thousand tests and what they import."""
    gc.collect()
    gc.freeze()
    # each test builds a gateway and forgets it: most of what is looked at is still in use
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def long(request: pytest.FixtureRequest) -> Callable[[float, float], float]:
    """Chooses between the size of a test in `make test` and the one in `make endure`."""
    is_full = request.config.getoption("--endure")
    return lambda short, full: full if is_full else short


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to `make endure` what `pairs` leaves out; switch sockets on in `**/integration` and some other folders."""
    if not config.getoption("--endure"):
        pairs.thin_out(config, items)
    dialect_turns.take_turns(config, items, TESTS)
    for item in items:
        parts = item.path.relative_to(TESTS).parts if item.path.is_relative_to(TESTS) else ()
        if "integration" in parts or parts[:1] in (("e2e",), ("contract",), ("ui",)):
            item.add_marker(pytest.mark.enable_socket)


def skip_or_fail(service: str, reason: str) -> NoReturn:
    """Skip, unless LORAPLEX_TEST_REQUIRE names the service: then the run promised to have it, and it is a failure."""
    if service in os.environ.get("LORAPLEX_TEST_REQUIRE", "").split(","):
        pytest.fail(f"LORAPLEX_TEST_REQUIRE names {service}, but {reason}", pytrace=False)
    pytest.skip(f"{service}: {reason}")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A real Postgres, started for this run only if none is there."""
    try:
        with running_postgres() as server:
            yield server
    except Unavailable as reason:
        skip_or_fail("postgres", str(reason))


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A Redis of this test alone."""
    try:
        with running_redis() as server:
            yield server
    except RedisUnavailable as reason:
        skip_or_fail("redis", str(reason))


def upgrade_to_head(url: str) -> None:
    """Run the project's migrations, as `loraplex db upgrade` does."""
    config = Config(toml_file=ROOT / "pyproject.toml")
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORAPLEX_DATABASE_URL", url)
        command.upgrade(config, "head")


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file that tests copy."""
    file = tmp_path_factory.mktemp("sqlite") / "template.db"
    upgrade_to_head(f"sqlite+aiosqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def postgres_template(postgres_server: PostgresServer) -> Iterator[str]:
    """The name of a migrated database that tests clone (about 20 ms each)."""
    name = postgres_server.create()
    try:
        upgrade_to_head(postgres_server.url(name))
        yield name
    finally:
        postgres_server.drop(name)


@pytest.fixture(params=["sqlite", "postgres"])
def dialect(request: pytest.FixtureRequest) -> str:
    """Each database test runs once on each of the two."""
    return str(request.param)


@pytest.fixture
def database_url(request: pytest.FixtureRequest, dialect: str, tmp_path: Path) -> Iterator[str]:
    """The URL of a database of this test alone, at the newest migration."""
    if dialect == "sqlite":
        file = tmp_path / "loraplex.db"
        shutil.copyfile(request.getfixturevalue("sqlite_template"), file)
        yield f"sqlite+aiosqlite:///{file}"
    else:
        yield from _postgres_database(request, request.getfixturevalue("postgres_template"))


@pytest.fixture
def empty_database_url(request: pytest.FixtureRequest, dialect: str, tmp_path: Path) -> Iterator[str]:
    """The URL of a database of this test alone, without tables: for tests of the migrations themselves."""
    if dialect == "sqlite":
        yield f"sqlite+aiosqlite:///{tmp_path / 'empty.db'}"
    else:
        yield from _postgres_database(request, None)


def _postgres_database(request: pytest.FixtureRequest, template: str | None) -> Iterator[str]:
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = server.create(template)
    try:
        yield server.url(name)
    finally:
        server.drop(name)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server for this run; only for tests that may open sockets."""
    try:
        with running_s3() as server:
            yield server
    except S3Unavailable as reason:
        skip_or_fail("s3", str(reason))


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A LORAPLEX_OBJECT_STORE_URL of this test alone; the credentials are in the environment, as boto3 finds them."""
    for name, value in s3_server.environ.items():
        monkeypatch.setenv(name, value)
    return s3_server.url()


@pytest.fixture(scope="session")
def bases_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny bases of this run lie, one folder each, named as the base."""
    return tmp_path_factory.mktemp("bases")


@pytest.fixture(scope="session")
def tiny_llama(bases_folder: Path) -> Path:
    """Random Llama, grouped queries, untied; a Hugging Face folder."""
    return write_base(bases_folder / "tiny-llama", tiny_llama_config())


@pytest.fixture(scope="session")
def tiny_tied(bases_folder: Path) -> Path:
    """Random Llama whose head is its embedding."""
    return write_base(bases_folder / "tiny-tied", tiny_tied_config())


@pytest.fixture(scope="session")
def tiny_qwen2(bases_folder: Path) -> Path:
    """Random Qwen2 with biases on q, k and v, untied."""
    return write_base(bases_folder / "tiny-qwen2", tiny_qwen2_config())


@pytest.fixture(params=["tiny_llama", "tiny_tied", "tiny_qwen2"])
def tiny_base(request: pytest.FixtureRequest) -> Path:
    """Each of the three tiny bases in turn."""
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.fixture(scope="session")
def smollm2_base() -> Path:
    """The real 135M chat model in the machine-wide cache; pulled by a child process if it is not there yet."""
    pull = [sys.executable, "-m", "loraplex_engine", "pull", "smollm2-135m", "--json"]
    done = subprocess.run(pull, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        skip_or_fail("smollm2", f"the base cannot be had: {done.stderr.strip()[-300:]}")
    return Path(json.loads(done.stdout.splitlines()[-1])["folder"])


@pytest.fixture
def run_python() -> Callable[[str], str]:
    """Run a program in a fresh interpreter and return what it printed; fails with its error otherwise."""

    def run(program: str) -> str:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
