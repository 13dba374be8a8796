"""A server that cannot start ends with a code that is not 0 and one sentence, whichever process found out."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex_engine.bases.pull import pull
from loraplex_registry.wire.identity import TokenSigner, generate_signing_key
from support import tiny_llama_config, write_base


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_base(tmp_path / "source", tiny_llama_config())


@pytest.fixture
def base(source: Path, tmp_path: Path) -> Path:
    return pull(str(source), tmp_path / "bases")


def serve(base: Path, *flags: str, listen: str = "127.0.0.1:0", log_level: str = "info") -> str:
    key = TokenSigner(generate_signing_key()).public_pem.decode()
    command = [sys.executable, "-m", "loraplex_engine", "serve", "--base", str(base), "--listen", listen, *flags]
    environment = {**os.environ, "LORAPLEX_VERIFY_KEYS": key, "LORAPLEX_LOG_LEVEL": log_level}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("loraplex engine: ")
    return last


def test_a_port_in_use(base: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        host, port = other.getsockname()
        assert f"Cannot listen on {host}:{port}: Address already in use" in serve(base, listen=f"{host}:{port}")


def test_a_pool_that_is_too_small(base: Path) -> None:
    assert "raise --kv-cache-memory-bytes" in serve(base, "--kv-cache-memory-bytes", "10")


def test_weights_that_were_cut(base: Path, source: Path) -> None:
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors changed or vanished since the base was pulled" in serve(base)


def test_a_base_that_is_not_there(tmp_path: Path) -> None:
    assert "loraplex base pull" in serve(tmp_path / "nowhere")


def test_a_log_level_that_there_is_none_of(base: Path) -> None:
    assert "LORAPLEX_LOG_LEVEL is 'loud'" in serve(base, log_level="loud")
