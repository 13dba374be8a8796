"""`loraplex adapters check DIR`: the registry's report, offline, without the model's libraries or a database."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from loraplex.cli.adapter_check import load_bases
from loraplex.client.errors import ClientError
from loraplex_registry.peft.check import check_adapter
from registry_world import build_tiny_spec
from support import tiny_llama_config, write_adapter, write_base

PROGRAM = """
import socket, sys
def refuse(*args, **kwargs): raise AssertionError("the network")
socket.socket.connect = refuse
from loraplex.__main__ import main
try:
    code = main()
except SystemExit as end:
    code = end.code
loaded = [name for name in ("torch", "transformers", "peft", "safetensors", "sqlalchemy") if name in sys.modules]
print(f"{code} {loaded}", file=sys.stderr)
"""


def test_the_report_is_the_registry_s_and_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    spec = build_tiny_spec()
    (tmp_path / "bases" / spec.name).mkdir(parents=True)
    (tmp_path / "bases" / spec.name / "base.json").write_bytes(msgspec.json.encode(spec))
    folder = write_adapter(tmp_path / "adapter", write_base(tmp_path / spec.name, tiny_llama_config()))
    (folder / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    files = {path.name: path for path in folder.iterdir()}
    for code in (1, 0):
        environment = {**os.environ, "LORAPLEX_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", PROGRAM, "adapters", "check", str(folder), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.stderr.splitlines()[-1] == f"{code} []", done.stderr
        report, plan = check_adapter(files, spec)
        answer = json.loads(done.stdout)
        assert answer["report"] == json.loads(msgspec.json.encode(report))
        assert answer["digest"] == (plan.digest if plan else None)
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


@pytest.mark.parametrize("content", [b"", b'{"x":' + b"[" * 100_000], ids=["cut", "nested"])
def test_a_base_that_rotted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setenv("LORAPLEX_CACHE_DIR", str(tmp_path))
    (tmp_path / "bases" / "tiny").mkdir(parents=True)
    (tmp_path / "bases" / "tiny" / "base.json").write_bytes(content)
    with pytest.raises(ClientError, match=r"tiny/base\.json cannot be read .*; pull the base again"):
        load_bases()
