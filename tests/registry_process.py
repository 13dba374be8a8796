"""A registry process of its own, started and stopped by tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loraplex_registry.app import upgrade
from loraplex_registry.wire.identity import TokenSigner
from registry_world import ENGINE_KEY
from support import free_port


def build_environ(tmp_path: Path, signer: TokenSigner, port: int, **more: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "LORAPLEX_DATA_DIR": str(tmp_path / "data"),
        "LORAPLEX_LISTEN": f"127.0.0.1:{port}",
        "LORAPLEX_VERIFY_KEYS": signer.public_pem.decode(),
        "LORAPLEX_ENGINE_KEY": ENGINE_KEY,
        **more,
    }


def start_process(environ: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-P", "-m", "loraplex_registry"], env=environ, stderr=subprocess.PIPE)


@contextlib.contextmanager
def running_registry(tmp_path: Path, signer: TokenSigner) -> Iterator[tuple[str, int]]:
    """The address and process id of a registry on SQLite and a folder."""
    upgrade(f"sqlite+aiosqlite:///{tmp_path}/data/loraplex.db")
    port = free_port()
    process = start_process(build_environ(tmp_path, signer, port))
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_alive(address, process)
        yield address, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        _, complaint = process.communicate(timeout=20)
    assert process.returncode == 0, complaint.decode()


def wait_until_alive(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{address}/healthz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    pytest.fail("the registry did not start")
