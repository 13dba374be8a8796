"""The front as a whole process: it listens, drains on SIGTERM, and never leaves its core behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import scripted_core_process
from scripted_core import BASE, SIGNER, sign
from toy_tokenizers import write_byte_level

SCRIPT = Path(scripted_core_process.__file__)
PROGRAM = """
import json, sys
from loraplex_engine.config import EngineConfig
from loraplex_engine.server import process
options = json.loads(sys.argv[1])
config = EngineConfig(base=options["base"], cache_dir="", served_model_name=options["behaviour"])
secrets = {"verify_keys": options["key"], "engine_key": "k"}
settings = {"listen": "127.0.0.1:0", "drain_s": str(options["drain_s"]), **secrets}
sys.exit(process.main(config, settings, core_command=[sys.executable, options["script"]]))
"""
CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
Start = Callable[..., tuple["subprocess.Popen[str]", httpx.Client]]


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[tuple[subprocess.Popen[str], httpx.Client]] = []

    def start_front(behaviour: str = "", drain_s: float = 5.0) -> tuple[subprocess.Popen[str], httpx.Client]:
        import json

        options = {
            "base": str(write_byte_level(tmp_path / "base")),
            "behaviour": behaviour,
            "drain_s": drain_s,
            "key": SIGNER.public_pem.decode(),
            "script": str(SCRIPT),
        }
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(options)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SCRIPT.parent)},
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.endswith(" (503 until the core is ready)\n")
        url = line.removeprefix("listening on ").split()[0]
        client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {sign(role='admin')}"}, timeout=20)
        started.append((process, client))
        wait_until(lambda: client.get("/readyz").status_code == 200)
        return process, client

    yield start_front
    for process, client in started:
        client.close()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def child_pids(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def core_pid(pid: int) -> int:
    """The core among a front's children, of which the sandbox is another."""
    [core] = [child for child in child_pids(pid) if b"sandbox" not in Path(f"/proc/{child}/cmdline").read_bytes()]
    return core


def test_sigterm_lets_open_streams_finish_and_exits_0(start: Start) -> None:
    process, client = start()
    with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert "data: [DONE]" in rest
    assert process.wait(60) == 0


def test_what_outlives_the_drain_ends_with_an_error_event(start: Start) -> None:
    process, client = start("hangs", drain_s=0.3)
    core = core_pid(process.pid)
    with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = "\n".join(lines)
    assert '"code": "draining"' in rest
    assert "[DONE]" not in rest
    assert process.wait(60) == 0
    assert not Path(f"/proc/{core}").exists()


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


def test_the_front_answers_while_its_core_restarts_and_killed_leaves_neither_core_nor_sandbox(start: Start) -> None:
    process, client = start()
    core = core_pid(process.pid)
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    os.kill(core, signal.SIGKILL)
    wait_until(lambda: client.get("/readyz").status_code == 503)
    assert client.get("/healthz").status_code == 200
    wait_until(lambda: client.get("/readyz").status_code == 200)
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert "loraplex_front_core_restarts 1.0" in client.get("/metrics").text
    wait_until(lambda: len(child_pids(process.pid)) == 2)
    children = child_pids(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: all(map(_is_gone, children)))


def test_sighup_trusts_the_keys_that_the_file_has_now(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loraplex_registry.wire.identity import Identity, TokenSigner, generate_signing_key

    file, newer = tmp_path / "verify.pem", TokenSigner(generate_signing_key())
    file.write_bytes(SIGNER.public_pem)
    monkeypatch.setenv("LORAPLEX_VERIFY_KEYS_FILE", str(file))
    process, client = start()
    token = client.headers["authorization"]
    file.write_text("no key")
    process.send_signal(signal.SIGHUP)
    file.write_bytes(SIGNER.public_pem + newer.public_pem)
    process.send_signal(signal.SIGHUP)
    claims = {"role": "admin", "scopes": (), "key_id": "k", "actor": "a", "request_id": "req_1"}
    newer_token = f"Bearer {newer.sign(Identity(tenant_id=None, tenant=None, **claims), 'engine')}"
    wait_until(lambda: client.get("/internal/state", headers={"authorization": newer_token}).status_code == 200)
    assert client.get("/internal/state").status_code == 200
    file.write_bytes(newer.public_pem)
    process.send_signal(signal.SIGHUP)
    wait_until(lambda: client.get("/internal/state", headers={"authorization": token}).status_code == 401)
    assert client.get("/internal/state", headers={"authorization": newer_token}).status_code == 200
