"""The front stays light, and refuses to start with settings it cannot use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import ConfigError
from loraplex_engine.server.process import main, read_secrets
from scripted_core import SIGNER
from toy_tokenizers import write_byte_level

HEAVY = ("torch", "transformers", "sqlalchemy", "numpy", "httpx", "huggingface_hub")
PROGRAM = """
import sys
import loraplex_engine.server.process
print([name for name in sys.argv[1:] if name in sys.modules])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_the_front_imports_nothing_heavy() -> None:
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM, *HEAVY], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    assert out[0] == "[]"
    assert int(out[1]) < 160 * 1024, "KiB"


@pytest.mark.parametrize("module", ["client", "openai", "done", "messages", "stream", "strict_json"])
def test_wire_imports_no_server_and_no_model(module: str) -> None:
    program = f"import sys, loraplex_engine.wire.{module}; print([n for n in sys.argv[1:] if n in sys.modules])"
    heavy = ("torch", "transformers", "litestar", "sqlalchemy", "tokenizers")
    out = subprocess.run([sys.executable, "-c", program, *heavy], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_verify_keys_come_as_pem_or_as_a_list() -> None:
    pem = SIGNER.public_pem.decode()
    import json

    for text in (pem, pem + pem, json.dumps([pem, pem])):
        keys = read_secrets({"verify_keys": text}).verify_keys
        assert set(keys) == {SIGNER.public_pem}
    assert "BEGIN" not in repr(read_secrets({"verify_keys": pem, "engine_key": "k"}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "LORAPLEX_VERIFY_KEYS"),
        ({"verify_keys": "[1]"}, "JSON list"),
        ({"verify_keys": SIGNER.public_pem.decode(), "listen": "nowhere"}, "HOST:PORT"),
        ({"verify_keys": SIGNER.public_pem.decode(), "listen": "127.0.0.1:99999"}, "HOST:PORT"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_sentence(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        main(EngineConfig(base="", cache_dir=""), settings)


def test_a_base_without_a_readable_tokenizer_is_refused(tmp_path: Path) -> None:
    from loraplex_engine.server.process import _load_tokenizer

    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        _load_tokenizer(tmp_path)
    assert _load_tokenizer(write_byte_level(tmp_path / "base"))
