"""The gateway as a process: it starts or says why not, drains on SIGTERM and exits 0, and shows no secret."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from gateway_world import until
from scripted_engine import running_engine
from support import free_port

PROGRAM = "import os, sys; from loraplex.app import run; from loraplex.settings import load_settings; "
PROGRAM += "sys.exit(run(load_settings(os.environ)))"
EACH = """
import json, os, sys
from loraplex.app import run
from loraplex.settings import load_settings
for settings in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        sys.exit(run(load_settings(os.environ | settings)))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"ended with {code}", file=sys.stderr, flush=True)
"""
"""A gateway process for each of some settings, one after another: what takes a second is to read the program."""


@pytest.fixture
def dialect() -> str:
    return "sqlite"


class Process:
    """A gateway that runs, and what it has logged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log = ""
        self.url = ""

    async def wait_until_listening(self) -> None:
        assert self.process.stderr is not None
        async with asyncio.timeout(30):
            while not (found := re.search(r'listening on (http://[^\s"]+)', self.log)):
                line = (await self.process.stderr.readline()).decode()
                assert line, self.log
                self.log += line
        self.url = found[1]

    async def wait(self) -> int:
        """Return the exit code, with the whole log read."""
        assert self.process.stderr is not None
        async with asyncio.timeout(30):
            self.log += (await self.process.stderr.read()).decode()
            return await self.process.wait()


def allow_few_files() -> None:
    """As many as a process usually begins with, or fewer."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))


@asynccontextmanager
async def gateway_process(data_dir: Path, *program: str, **settings: str) -> AsyncIterator[Process]:
    environ = {
        "PATH": os.environ["PATH"],
        "LORAPLEX_DATA_DIR": str(data_dir),
        "LORAPLEX_LISTEN": "127.0.0.1:0",
        **settings,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", *(program or (PROGRAM,))),
        env=environ,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=allow_few_files,
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_callers_without_a_key_who_stay_keep_nobody_out(database_url: str, tmp_path: Path) -> None:
    async with gateway_process(tmp_path) as gateway:
        await gateway.wait_until_listening()
        host, port = gateway.url.removeprefix("http://").split(":")
        idle = []
        for _ in range(200):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            idle.append(writer)
            assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
        for writer in idle:
            writer.close()
        assert resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE)[0] > 128


async def test_first_start_makes_the_keys_and_sigterm_ends_with_0(database_url: str, tmp_path: Path) -> None:
    async with gateway_process(tmp_path) as gateway:
        await gateway.wait_until_listening()
        admin_key = (tmp_path / "admin.key").read_text().strip()
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
            response = await http.get("/api/v1/tenants", headers={"authorization": f"Bearer {admin_key}"})
            assert (response.status_code, response.json()["data"]) == (200, [])
            assert "server" not in response.headers
        gateway.process.send_signal(signal.SIGTERM)
        assert await gateway.wait() == 0
    for name in ("admin.key", "key.pepper", "signing.pem"):
        file = tmp_path / name
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.read_text().strip() not in gateway.log
    assert str(tmp_path / "admin.key") in gateway.log


async def test_a_redis_beside_sqlite_is_said_not_to_be_used(database_url: str, tmp_path: Path) -> None:
    async with gateway_process(tmp_path, LORAPLEX_REDIS_URL="redis://127.0.0.1:1") as gateway:
        await gateway.wait_until_listening()
    (line,) = [line for line in gateway.log.splitlines() if "REDIS" in line]
    assert json.loads(line)["level"] == "warning"
    assert "LORAPLEX_REDIS_URL is not used: with SQLite" in line


async def test_a_running_stream_ends_before_the_process(database_url: str, tmp_path: Path) -> None:
    async with running_engine() as engine:
        pools = json.dumps({"main": {"base": "tiny", "engines": [engine.url]}})
        async with gateway_process(tmp_path, LORAPLEX_POOLS=pools, LORAPLEX_ADMIN_KEY="an-admin-key-1234") as gateway:
            await gateway.wait_until_listening()
            headers = {"authorization": "Bearer an-admin-key-1234"}
            async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, headers=headers) as http:
                base = {"name": "tiny", "fingerprint": engine.fingerprint, "modules": {"m": [1, 1]}, "vocab_size": 9}
                assert (await http.post("/api/v1/bases", json=base)).status_code == 201
                await asyncio.sleep(2.2)
                fields = {"model": "tiny", "prompt": "pause", "stream": True}
                async with http.stream("POST", "/v1/completions", json=fields) as response:
                    assert response.status_code == 200
                    gateway.process.send_signal(signal.SIGTERM)
                    await asyncio.sleep(0.3)
                    with pytest.raises(httpx.ConnectError):
                        await httpx.AsyncClient(trust_env=False).get(f"{gateway.url}/healthz")
                    engine.go_on.set()
                    text = (await response.aread()).decode()
                assert text.endswith("data: [DONE]\n\n")
            assert await gateway.wait() == 0


async def test_a_schema_that_is_not_ours_exits_3_with_the_command(tmp_path: Path) -> None:
    async with gateway_process(tmp_path) as gateway:
        assert await gateway.wait() == 3
    assert "loraplex db upgrade" in gateway.log
    assert "Traceback" not in gateway.log


async def test_a_bad_setting_exits_2_in_one_line(database_url: str, tmp_path: Path) -> None:
    cases = [
        ({"LORAPLEX_POOLS": "["}, "LORAPLEX_POOLS"),
        ({"LORAPLEX_ADMIN_KEY": "short"}, "LORAPLEX_ADMIN_KEY"),
        ({"LORAPLEX_SIGNING_KEY": "not a key"}, "LORAPLEX_SIGNING_KEY"),
        ({"LORAPLEX_OBJECT_STORE_URL": "ftp://x"}, "LORAPLEX_OBJECT_STORE_URL"),
        ({"LORAPLEX_DATABASE_URL": "mysql://u:hidden-word@h/d"}, "LORAPLEX_DATABASE_URL"),
        ({"LORAPLEX_LISTEN": "0.0.0.0:0"}, "LORAPLEX_LISTEN"),
    ]
    async with gateway_process(tmp_path, EACH, json.dumps([settings for settings, _ in cases])) as gateways:
        assert await gateways.wait() == 0, gateways.log
    *logs, rest = re.split(r"^(?=ended with )", gateways.log, flags=re.MULTILINE)
    codes = re.findall(r"^ended with (.+)$", gateways.log, flags=re.MULTILINE)
    assert codes == ["2"] * len(cases), gateways.log
    assert rest == "ended with 2\n"
    for (_, named), log in zip(cases, logs, strict=True):
        (line,) = log.removeprefix("ended with 2\n").splitlines()
        assert named in line
        assert "Traceback" not in line
        assert "hidden-word" not in line


async def test_a_taken_port_is_said(database_url: str, tmp_path: Path) -> None:
    port = free_port()
    server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", port)
    async with server, gateway_process(tmp_path, LORAPLEX_LISTEN=f"127.0.0.1:{port}") as gateway:
        assert await gateway.wait() == 2
    assert f"127.0.0.1:{port}" in gateway.log


async def test_sighup_reads_pools_and_level_anew_and_says_what_it_does_not(database_url: str, tmp_path: Path) -> None:
    pools, level, drain = (tmp_path / name for name in ("pools", "level", "drain"))
    pools.write_text("{}")
    level.write_text("info")
    drain.write_text("1")
    files = {
        "LORAPLEX_POOLS_FILE": str(pools),
        "LORAPLEX_LOG_LEVEL_FILE": str(level),
        "LORAPLEX_DRAIN_S_FILE": str(drain),
    }
    async with running_engine() as engine, gateway_process(tmp_path, **files) as gateway:
        await gateway.wait_until_listening()
        bearer = {"authorization": f"Bearer {(tmp_path / 'admin.key').read_text().strip()}"}
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, headers=bearer) as http:
            assert (await http.get("/api/v1/fleet")).json()["data"] == []
            pools.write_text("not JSON")
            level.write_text("debug")
            gateway.process.send_signal(signal.SIGHUP)
            await _read_until(gateway, "LORAPLEX_LOG_LEVEL is read anew")
            assert "LORAPLEX_POOLS stays as it was" in gateway.log
            assert '"level":"debug"' not in gateway.log
            await http.get("/healthz")
            await _read_until(gateway, '"level":"debug"')
            pools.write_text(json.dumps({"main": {"base": "tiny", "engines": [engine.url]}}))
            drain.write_text("2")
            gateway.process.send_signal(signal.SIGHUP)
            await _read_until(gateway, "LORAPLEX_DRAIN_S has changed in its file; it is read at the next start")
            assert "LORAPLEX_POOLS is read anew" in gateway.log

            async def is_known() -> bool:
                return [one["url"] for one in (await http.get("/api/v1/fleet")).json()["data"]] == [engine.url]

            await until(is_known, 20)


async def _read_until(gateway: Process, words: str) -> None:
    assert gateway.process.stderr is not None
    async with asyncio.timeout(20):
        while words not in gateway.log:
            gateway.log += (await gateway.process.stderr.readline()).decode()
