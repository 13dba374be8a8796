"""A set-up in which nothing is wrong: all is ok, looked at as a cluster, as one machine, from a URL and a key."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from databases import PostgresServer
from doctor_world import SIGNING_KEY, planted_engine, see, verdicts, write_folder
from gateway_world import running_world
from loraplex.doctor.examination import Examination, examine
from loraplex_registry.wire.identity import TokenSigner
from redis_world import RedisServer

ADMIN_KEY, PEPPER, ENGINE_KEY = "an-admin-key-for-tests", "a-pepper-of-these-tests-alone", "an-engine-key-for-tests"


@pytest.fixture
def postgres_url(postgres_server: PostgresServer, postgres_template: str) -> Iterator[str]:
    name = postgres_server.create(postgres_template)
    yield postgres_server.url(name)
    postgres_server.drop(name)


@asynccontextmanager
async def cluster(postgres_url: str, redis: RedisServer, s3_url: str, folder: Path) -> AsyncIterator[dict[str, str]]:
    """Yield the environment of a running gateway."""
    with planted_engine() as engine:
        shared: dict[str, Any] = {
            "redis_url": redis.url,
            "object_store_url": s3_url,
            "pools": json.dumps({"main": {"base": "tiny", "engines": [engine.url]}}),
            "admin_key": ADMIN_KEY,
            "key_pepper": PEPPER,
            "engine_key": ENGINE_KEY,
            "signing_key": SIGNING_KEY.decode(),
        }
        async with running_world(postgres_url, folder, num_engines=0, **shared) as world:
            yield {
                **{f"LORAPLEX_{name.upper()}": str(value) for name, value in shared.items()},
                "LORAPLEX_DATABASE_URL": postgres_url,
                "LORAPLEX_LISTEN": world.url.removeprefix("http://"),
                "LORAPLEX_URL": world.url,
                "LORAPLEX_API_KEY": ADMIN_KEY,
            }


OF_THE_MACHINE = ("database.latency", "database.connections", "redis.latency", "machine.disk")
"""What other tests, or little room, may be to blame for."""


def _bad(found: Examination) -> list[str]:
    bad = [one for one in found.findings if one.verdict in ("warn", "fail")]
    return [f"{one.check}: {one.message}" for one in bad if one.check not in OF_THE_MACHINE]


async def test_a_healthy_cluster_is_all_ok(
    postgres_url: str, redis_server: RedisServer, s3_url: str, tmp_path: Path
) -> None:
    async with cluster(postgres_url, redis_server, s3_url, tmp_path) as environ:
        found = await asyncio.to_thread(examine, see(environ, "gateway", limit_s=20.0))
        client = {name: environ[name] for name in ("LORAPLEX_URL", "LORAPLEX_API_KEY")}
        from_afar = await asyncio.to_thread(examine, see(client, "client", limit_s=20.0))
        client["LORAPLEX_API_KEY"] = "lpx_another"
        refused = await asyncio.to_thread(examine, see(client, "client", limit_s=20.0))
    assert _bad(found) == []
    seen = {one.check for one in found.findings if one.verdict == "ok"}
    assert seen >= {
        "settings.values",
        *(f"keys.{name}" for name in ("admin", "pepper", "engine", "signing", "hashes")),
        *(f"database.{name}" for name in ("reachable", "version", "migrations", "permissions", "clock")),
        *(f"store.{name}" for name in ("reachable", "writes", "reads_back", "conditional_create", "checksum")),
        *("store.presign", "store.deletes", "store.clock"),
        *(f"redis.{name}" for name in ("reachable", "version", "eviction", "scripts", "clock")),
        *(f"engines.{name}" for name in ("reachable", "base", "weights", "clock")),
        *(f"platform.{name}" for name in ("reachable", "ready", "key", "engine", "clock")),
        *("machine.files", "machine.port", "machine.proxies"),
    }
    assert _bad(from_afar) == []
    assert {"platform.ready", "platform.engine"} <= {one.check for one in from_afar.findings}
    assert [one.check for one in refused.findings if one.verdict == "fail"] == ["platform.key"]
    for secret in (ADMIN_KEY, PEPPER, ENGINE_KEY, "PRIVATE KEY", "secret-of-the-tests-alone"):
        assert secret not in str((found, from_afar))


async def test_wrong_credentials_of_a_real_store(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from doctor_world import look
    from loraplex.doctor.store import check_store

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-than-the-right-one")
    found = look(check_store, see({"LORAPLEX_OBJECT_STORE_URL": s3_url}))
    assert verdicts(found) == {"store.reachable": "fail"}
    assert "AWS_SECRET_ACCESS_KEY" in found["store.reachable"].remedy


def _doctor(environ: dict[str, str], *words: str, **options: Any) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "loraplex", "doctor", "--json", *words]
    env = {"PATH": "/usr/bin:/bin", **environ}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False, **options)
    return done.returncode, json.loads(done.stdout), done.stdout + done.stderr


def test_a_healthy_data_folder_by_command(tmp_path: Path, sqlite_template: Path) -> None:
    folder = write_folder(
        tmp_path / "data",
        key_pepper=PEPPER,
        admin_key=ADMIN_KEY,
        engine_key=ENGINE_KEY,
        signing_pem=SIGNING_KEY.decode(),
        verify_pem=TokenSigner(SIGNING_KEY).public_pem.decode(),
    )
    shutil.copyfile(sqlite_template, folder / "loraplex.db")
    (folder / "objects").mkdir()
    environ = {"LORAPLEX_DATA_DIR": str(folder), "LORAPLEX_LISTEN": "127.0.0.1:0", "HOME": str(tmp_path)}
    code, found, said = _doctor(environ)
    bad = [one for one in found["findings"] if one["verdict"] == "fail"]
    assert (code, found["part"], found["is_healthy"], bad) == (0, "up", True, [])
    ok = {one["check"] for one in found["findings"] if one["verdict"] == "ok"}
    assert ok >= {"database.migrations", "store.conditional_create", "keys.same", "machine.torch", "machine.gpu"}
    for secret in (ADMIN_KEY, PEPPER, ENGINE_KEY, "PRIVATE KEY"):
        assert secret not in said
    assert list((folder / "objects").rglob("*")) == []


def test_faults_by_command_end_with_one(tmp_path: Path) -> None:
    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    environ = {
        "LORAPLEX_DATA_DIR": str(tmp_path),
        "LORAPLEX_POOLZ": "{}",
        "LORAPLEX_WHATEVER_THIS_IS": "1",
        "LORAPLEX_LOG_LEVEL": "loud",
    }
    code, found, _ = _doctor(environ, "--part", "gateway", preexec_fn=limit_files)
    assert code == 1
    bad = {
        one["subject"] or one["check"]: one
        for one in found["findings"]
        if one["verdict"] in ("warn", "fail") and one["check"] not in OF_THE_MACHINE
    }
    assert set(bad) == {"LORAPLEX_POOLZ", "LORAPLEX_LOG_LEVEL", "settings.names", "machine.files", "keys.engine"}
    assert "LORAPLEX_POOLS" in bad["LORAPLEX_POOLZ"]["message"]
    assert (bad["machine.files"]["verdict"], bad["settings.names"]["verdict"]) == ("fail", "warn")
    assert "LimitNOFILE" in bad["machine.files"]["remedy"]
