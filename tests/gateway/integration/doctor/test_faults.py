"""Faults that are planted, one by one: doctor finds each, says what to do, shows no secret and is done in time."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from databases import PostgresServer
from doctor_world import (
    SIGNING_KEY,
    look,
    planted_engine,
    planted_s3,
    refusing_postgres,
    see,
    silent_server,
    verdicts,
    write_folder,
)
from loraplex.doctor.database import check_database
from loraplex.doctor.engines import check_engines
from loraplex.doctor.finding import Check, run_checks
from loraplex.doctor.keys import check_keys, check_pepper, check_registry_door
from loraplex.doctor.machine import check_disks, check_port, check_proxies
from loraplex.doctor.platform import check_platform
from loraplex.doctor.redis_server import check_redis
from loraplex.doctor.settings import check_settings
from loraplex.doctor.store import check_store
from loraplex_registry.wire.identity import TokenSigner, generate_signing_key
from redis_world import RedisServer

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "a-secret-of-s3"}
PASSWORD = "p-ss/w#rd"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**CREDENTIALS, "AWS_CONFIG_FILE": "/dev/null", "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def postgres_url(postgres_server: PostgresServer, postgres_template: str) -> Iterator[str]:
    name = postgres_server.create(postgres_template)
    yield postgres_server.url(name)
    postgres_server.drop(name)


@contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def test_a_wrong_password_of_the_database() -> None:
    with refusing_postgres() as port:
        url = f"postgresql+psycopg://loraplex:p-ss%2Fw%23rd@127.0.0.1:{port}/x"
        found = look(check_database, see({"LORAPLEX_DATABASE_URL": url}))["database.reachable"]
    assert found.verdict == "fail"
    assert "password authentication failed" in found.message
    assert "LORAPLEX_DATABASE_URL" in found.remedy
    assert PASSWORD not in str(found)
    assert "p-ss" not in str(found)


def test_a_user_whom_the_database_does_not_know(postgres_url: str) -> None:
    url = sa.make_url(postgres_url).set(username="nobody_of_this_name").render_as_string(hide_password=False)
    found = look(check_database, see({"LORAPLEX_DATABASE_URL": url}))["database.reachable"]
    assert found.verdict == "fail"
    assert "user and password" in found.remedy


def test_a_database_that_does_not_exist(postgres_url: str) -> None:
    url = sa.make_url(postgres_url).set(database="none_of_this_name").render_as_string(hide_password=False)
    assert (
        "Create the database" in look(check_database, see({"LORAPLEX_DATABASE_URL": url}))["database.reachable"].remedy
    )


def test_a_database_that_hangs_holds_up_nobody_else() -> None:
    with silent_server() as port:
        patient = see({"LORAPLEX_DATABASE_URL": f"postgresql+psycopg://u:{PASSWORD}@127.0.0.1:{port}/x"}, limit_s=1.0)
        began_at = time.monotonic()
        checks = [
            Check("database", lambda: check_database(patient), 1.0, "Look at the network."),
            Check("machine.proxies", lambda: check_proxies(patient), 1.0),
        ]
        found = run_checks(checks)
        assert time.monotonic() - began_at < 2.5
    assert [(one.check, one.verdict) for one in found] == [("database", "fail"), ("machine.proxies", "ok")]
    assert found[0].remedy == "Look at the network."


@pytest.mark.parametrize(
    ("revision", "words", "remedy"),
    [
        ("0011_measured_weights", "behind", "loraplex db upgrade"),
        ("9999_from_the_future", "ahead", "Upgrade this program"),
    ],
)
def test_a_migration_that_is_missing_or_too_many(postgres_url: str, revision: str, words: str, remedy: str) -> None:
    with connected(postgres_url) as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = :it"), {"it": revision})
        connection.execute(sa.text("DELETE FROM compatible_revision WHERE revision > '0011'"))
    found = look(check_database, see({"LORAPLEX_DATABASE_URL": postgres_url}))
    assert found["database.migrations"].verdict == "fail"
    assert words in found["database.migrations"].message
    assert remedy in found["database.migrations"].remedy
    assert found["database.reachable"].verdict == "ok"


def test_a_user_of_the_database_who_may_not_write(postgres_url: str) -> None:
    role = f"loraplex_test_{os.getpid()}"
    parsed = sa.make_url(postgres_url)
    with connected(postgres_url) as connection:
        connection.execute(sa.text(f"CREATE ROLE {role} LOGIN PASSWORD 'x'"))
        connection.execute(sa.text(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}"))
        try:
            url = parsed.set(username=role, password="x").render_as_string(hide_password=False)
            found = look(check_database, see({"LORAPLEX_DATABASE_URL": url}))["database.permissions"]
        finally:
            connection.execute(sa.text(f"DROP OWNED BY {role}"))
            connection.execute(sa.text(f"DROP ROLE {role}"))
    assert found.verdict == "fail"
    assert "may not read and write" in found.message
    assert "GRANT" in found.remedy


def test_a_folder_of_objects_that_takes_none() -> None:
    found = look(check_store, see({"LORAPLEX_OBJECT_STORE_URL": "file:///sys/kernel"}))
    assert verdicts(found) == {"store.writes": "fail"}
    assert "writable" in found["store.writes"].remedy


def test_an_s3_server_without_conditional_writes() -> None:
    with planted_s3(ignores_conditions=True) as url:
        found = look(check_store, see({"LORAPLEX_OBJECT_STORE_URL": url}))
    assert {name for name, one in found.items() if one.verdict != "ok"} == {"store.conditional_create"}
    assert "If-None-Match" in found["store.conditional_create"].remedy


def test_an_s3_server_that_verifies_no_checksum() -> None:
    with planted_s3(ignores_checksums=True) as url:
        found = look(check_store, see({"LORAPLEX_OBJECT_STORE_URL": url}))
    assert {name for name, one in found.items() if one.verdict == "fail"} == {"store.checksum", "store.presign"}


def test_an_s3_server_whose_clock_is_off() -> None:
    with planted_s3(skew_s=-1000) as url:
        found = look(check_store, see({"LORAPLEX_OBJECT_STORE_URL": url}))["store.clock"]
    assert found.verdict == "fail"
    assert "1000 s behind" in found.message or "1001 s behind" in found.message
    assert "NTP" in found.remedy


@pytest.mark.parametrize(
    ("code", "remedy"), [("SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"), ("RequestTimeTooSkewed", "clock")]
)
def test_an_s3_server_that_refuses_us(code: str, remedy: str) -> None:
    with planted_s3(refuses=code) as url:
        found = look(check_store, see({"LORAPLEX_OBJECT_STORE_URL": url, **CREDENTIALS}))
    assert verdicts(found) == {"store.reachable": "fail"}
    assert code in found["store.reachable"].message
    assert remedy in found["store.reachable"].remedy


def test_an_s3_server_that_swallows_everything() -> None:
    with planted_s3(hangs=True) as url:
        patient = see({"LORAPLEX_OBJECT_STORE_URL": url})
        began_at = time.monotonic()
        (found,) = run_checks([Check("store", lambda: check_store(patient), 1.0, "Check the endpoint.")])
        assert time.monotonic() - began_at < 2.5
    assert (found.verdict, found.remedy) == ("fail", "Check the endpoint.")


def test_a_redis_that_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = look(check_redis, see({"LORAPLEX_REDIS_URL": f"redis://:p-ss%2Fw%23rd@127.0.0.1:{port}/0"}))
    assert verdicts(found) == {"redis.reachable": "fail"}
    # one that should have been encoded makes the URL none
    patient = see({"LORAPLEX_REDIS_URL": f"redis://:{PASSWORD}@127.0.0.1:{port}/0"})
    (broken,) = run_checks([Check("redis", lambda: check_redis(patient), 1.0, "It hangs.")])
    settings = look(check_settings, patient)["settings.values"]
    assert (broken.verdict, broken.remedy, settings.verdict) == ("skip", "", "fail")
    assert "%2F" in settings.message
    assert "p-ss" not in str((found, broken, settings))


def test_a_redis_beside_sqlite_is_nobodys(tmp_path: Path) -> None:
    environ = {"LORAPLEX_DATA_DIR": str(tmp_path), "LORAPLEX_REDIS_URL": "redis://127.0.0.1:1"}
    found = look(check_redis, see(environ, "up"))
    assert verdicts(found) == {"redis.reachable": "warn"}
    assert "is not used: with SQLite" in found["redis.reachable"].message


def test_a_redis_that_forgets_under_pressure(redis_server: RedisServer) -> None:
    from redis import Redis

    with Redis.from_url(redis_server.url) as admin:
        patient = see({"LORAPLEX_REDIS_URL": redis_server.url})
        assert set(verdicts(look(check_redis, patient)).values()) == {"ok"}
        admin.config_set("maxmemory-policy", "allkeys-lru")
        assert look(check_redis, patient)["redis.eviction"].verdict == "warn"
        admin.config_set("maxmemory", "100mb")
        found = look(check_redis, patient)["redis.eviction"]
        admin.config_set("requirepass", "a-password-of-redis")
        refused = look(check_redis, patient)["redis.reachable"]
    assert found.verdict == "fail"
    assert "noeviction" in found.remedy
    assert refused.verdict == "fail"


def _pools(*urls: str) -> str:
    listed = ", ".join(f'"{url}"' for url in urls)
    return f'{{"main": {{"base": "tiny", "engines": [{listed}]}}}}'


@pytest.fixture
def environ(tmp_path: Path, sqlite_template: Path) -> dict[str, str]:
    """A gateway's, whose database knows the base `tiny` of the engines here."""
    import shutil

    from scripted_engine import FINGERPRINT

    file = tmp_path / "loraplex.db"
    shutil.copyfile(sqlite_template, file)
    with connected(f"sqlite:///{file}") as connection:
        columns = {column["name"] for column in sa.inspect(connection).get_columns("base")}
        row = {"id": b"0" * 16, "name": "tiny", "fingerprint": FINGERPRINT}
        filled = {name: row.get(name, "{}") for name in columns}
        filled |= {name: 1 for name in columns if name.startswith(("max_", "default_", "vocab", "changed"))}
        filled |= {name: "2026-01-01 00:00:00" for name in columns if name.endswith("_at")}
        names = ", ".join(filled)
        connection.execute(
            sa.text(f"INSERT INTO base ({names}) VALUES ({', '.join(f':{name}' for name in filled)})"), filled
        )
    return {
        "LORAPLEX_DATABASE_URL": f"sqlite+aiosqlite:///{file}",
        "LORAPLEX_SIGNING_KEY": SIGNING_KEY.decode(),
        "LORAPLEX_OBJECT_STORE_URL": f"file://{tmp_path}/objects",
    }


def test_an_engine_with_another_base(environ: dict[str, str]) -> None:
    with planted_engine(fingerprint=f"sha256:{'0' * 64}") as other, planted_engine() as right:
        found = look(check_engines, see({**environ, "LORAPLEX_POOLS": _pools(other.url, right.url)}))
    assert found["engines.base"].verdict == "fail"
    assert other.url in found["engines.base"].message
    assert "another model" in found["engines.base"].message
    assert found["engines.weights"].verdict == "ok"


def test_engines_of_a_pool_with_different_weights(environ: dict[str, str]) -> None:
    with planted_engine() as one, planted_engine(weights_digest=f"sha256:{'b' * 64}") as other:
        found = look(check_engines, see({**environ, "LORAPLEX_POOLS": _pools(one.url, other.url)}))
    assert found["engines.weights"].verdict == "fail"
    assert found["engines.base"].verdict == "ok"


def test_an_engine_that_trusts_another_gateway(environ: dict[str, str]) -> None:
    with planted_engine(trusts=TokenSigner(generate_signing_key()).public_pem) as engine:
        found = look(check_engines, see({**environ, "LORAPLEX_POOLS": _pools(engine.url)}))
    assert found["keys.same"].verdict == "fail"
    assert "LORAPLEX_VERIFY_KEYS" in found["keys.same"].remedy


def test_an_engine_whose_clock_is_off(environ: dict[str, str]) -> None:
    with planted_engine(skew_s=-90) as engine:
        found = look(check_engines, see({**environ, "LORAPLEX_POOLS": _pools(engine.url)}))
    assert found["engines.clock"].verdict == "fail"
    assert "behind" in found["engines.clock"].message


def test_an_engine_without_compiled_ops_and_one_that_is_gone(environ: dict[str, str]) -> None:
    with planted_engine() as gone:
        pass
    with planted_engine(ops="torch") as slow:
        found = look(check_engines, see({**environ, "LORAPLEX_POOLS": _pools(slow.url, gone.url)}))
    assert found["engines.ops"].verdict == "warn"
    assert "g++" in found["engines.ops"].remedy
    assert found["engines.reachable"].verdict == "fail"
    assert gone.url in found["engines.reachable"].message


def test_an_engine_with_another_key_than_the_gateway() -> None:
    with planted_engine(engine_key="the-gateways-engine-key") as gateway:
        told = {"LORAPLEX_REGISTRY_URL": gateway.url, "LORAPLEX_ENGINE_KEY": "another-engine-key"}
        found = look(check_registry_door, see(told, "engine"))
        told["LORAPLEX_ENGINE_KEY"] = "the-gateways-engine-key"
        mended = look(check_registry_door, see(told, "engine"))
    assert verdicts(found) == {"registry.reachable": "ok", "keys.same": "fail"}
    assert "another-engine-key" not in str(found)
    assert verdicts(mended) == {"registry.reachable": "ok", "keys.same": "ok"}


def test_keys_that_are_weak_open_or_do_not_fit(tmp_path: Path) -> None:
    other = TokenSigner(generate_signing_key()).public_pem.decode()
    folder = write_folder(
        tmp_path / "data",
        key_pepper="change-me-change-me",
        admin_key="an-admin-key-of-a-test",
        engine_key="x" * 40,
        signing_pem=SIGNING_KEY.decode(),
        verify_pem=other,
    )
    (folder / "admin.key").chmod(0o644)
    found = look(check_keys, see({"LORAPLEX_DATA_DIR": str(folder)}, "up"))
    assert verdicts(found) == {
        "keys.admin": "ok",
        "keys.pepper": "fail",
        "keys.engine": "fail",
        "keys.signing": "ok",
        "keys.same": "fail",
        "keys.files": "warn",
    }
    assert "chmod 600" in found["keys.files"].remedy
    assert "change-me" not in str(found)


async def test_a_pepper_that_other_gateways_do_not_have(environ: dict[str, str]) -> None:
    from loraplex.db.database import Database
    from loraplex.keys.service import KeyService

    database = Database(environ["LORAPLEX_DATABASE_URL"])
    await KeyService(database, b"the-pepper-of-all-gateways").ensure_bootstrap_key("an-admin-key-of-a-test")
    await database.close()
    told = {**environ, "LORAPLEX_ADMIN_KEY": "an-admin-key-of-a-test"}
    same = look(check_pepper, see({**told, "LORAPLEX_KEY_PEPPER": "the-pepper-of-all-gateways"}))
    other = look(check_pepper, see({**told, "LORAPLEX_KEY_PEPPER": "the-pepper-of-nobody-else"}))
    assert (same["keys.hashes"].verdict, other["keys.hashes"].verdict) == ("ok", "fail")


@pytest.mark.parametrize(
    ("free_bytes", "inodes", "verdict"), [(100 << 20, 10**6, "fail"), (2 << 30, 10**6, "warn"), (1 << 40, 10, "fail")]
)
def test_a_disk_that_is_full(tmp_path: Path, free_bytes: int, inodes: int, verdict: str) -> None:
    def statvfs(path: str) -> os.statvfs_result:
        return os.statvfs_result(
            (4096, 4096, 1 << 30, free_bytes >> 12, free_bytes >> 12, 10**7, inodes, inodes, 0, 255)
        )

    found = look(check_disks, see({"LORAPLEX_DATA_DIR": str(tmp_path)}), statvfs)["machine.disk"]
    assert found.verdict == verdict
    assert "free" in found.message.lower()


def test_a_port_that_somebody_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        found = look(check_port, see({"LORAPLEX_LISTEN": listen}))["machine.port"]
    assert found.verdict == "fail"
    assert f"process {os.getpid()} " in found.message
    with planted_engine() as engine:
        ours = look(check_port, see({"LORAPLEX_LISTEN": engine.url.removeprefix("http://")}))["machine.port"]
    assert ours.verdict == "ok"


def test_a_proxy_between_us_and_the_store() -> None:
    told = {
        "LORAPLEX_OBJECT_STORE_URL": "s3://bucket/x?endpoint=https://minio.example:9000",
        "HTTPS_PROXY": "http://user:a-proxy-password@proxy:3128",
    }
    found = look(check_proxies, see(told))["machine.proxies"]
    assert (found.verdict, "minio.example" in found.remedy) == ("warn", True)
    assert "a-proxy-password" not in str(found)
    for listed, verdict in (("minio.example", "ok"), ("a, .example:443", "ok"), ("*", "ok"), ("example.com", "warn")):
        assert look(check_proxies, see({**told, "NO_PROXY": listed}))["machine.proxies"].verdict == verdict


def test_a_platform_that_is_not_there_or_refuses_the_key() -> None:
    with planted_engine() as gone:
        pass
    found = look(check_platform, see({"LORAPLEX_URL": gone.url, "LORAPLEX_API_KEY": "lpx_secret"}, "client"))
    assert verdicts(found) == {"platform.reachable": "fail"}
    with planted_engine() as server:
        refused = look(check_platform, see({"LORAPLEX_URL": server.url, "LORAPLEX_API_KEY": "lpx_secret"}, "client"))
    assert refused["platform.key"].verdict == "fail"
    assert "lpx_secret" not in str(refused)


def test_a_key_that_is_set_but_empty(tmp_path: Path) -> None:
    environ = {"LORAPLEX_DATA_DIR": str(tmp_path), "LORAPLEX_API_KEY": ""}
    found = look(check_settings, see(environ, "up"))["settings.empty"]
    assert (found.verdict, found.subject) == ("warn", "LORAPLEX_API_KEY")
    assert look(check_settings, see(environ, "client"))["settings.values"].verdict == "fail"


def test_a_platform_that_was_killed_is_not_asked_and_one_that_hangs_is(tmp_path: Path) -> None:
    import fcntl

    with planted_engine() as gone:
        pass
    write_folder(tmp_path, admin_key="an-admin-key-of-a-test", lock="")
    (tmp_path / "url").write_text(gone.url)
    environ = {"LORAPLEX_DATA_DIR": str(tmp_path)}
    assert verdicts(look(check_platform, see(environ, "up"))) == {"platform.reachable": "skip"}
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert verdicts(look(check_platform, see(environ, "up"))) == {"platform.reachable": "fail"}


def test_a_check_that_breaks_stops_no_other() -> None:
    def broken() -> Iterator[None]:
        raise ValueError("a library that quotes a-secret")

    patient = see({})
    found = run_checks([Check("broken", broken, 1.0), Check("machine.proxies", lambda: check_proxies(patient), 1.0)])
    assert [(one.check, one.verdict) for one in found] == [("broken", "fail"), ("machine.proxies", "ok")]
    assert "a-secret" not in str(found)
