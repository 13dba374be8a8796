"""`loraplex adapters push` of something large to a real gateway: killed and gone on with, in little memory."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash_world import ADMIN_KEY, TENANT, CrashWorld
from large_adapter import MODULES, LargeAdapter, describe_base
from loraplex.client.errors import ClientError

_STALLING = """
import sys, time
from loraplex.client.part_sender import PartSender
send = PartSender.send
PartSender.send = lambda self, part: time.sleep(600) if part.number else send(self, part)
from loraplex.cli.app import main
sys.exit(main())
"""
"""The command, with a network that lets through nothing but the first part of each file."""
_MEASURED = """
import atexit, pathlib, sys
tell = lambda: print(pathlib.Path("/proc/self/status").read_text(), file=sys.stderr)
atexit.register(tell)
from loraplex.cli.app import main
sys.exit(main())
"""
"""The command, which tells its own peak of memory at its end; what its parent knows of it includes the parent's."""


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
def world(database_url: str, tmp_path: Path) -> Iterator[CrashWorld]:
    world = CrashWorld(tmp_path, database_url, f"file://{tmp_path}/objects", {}, seed=0)
    try:
        world.start()
        with world.client() as client:
            client.connection.send("POST", "/api/v1/bases", json=describe_base("big"))
            client.create_tenant(TENANT)
        yield world
    finally:
        world.stop()


def start_push(world: CrashWorld, folder: Path, *flags: str, program: str | None = None) -> subprocess.Popen[str]:
    settings = {
        "LORAPLEX_URL": world.url,
        "LORAPLEX_API_KEY": ADMIN_KEY,
        "LORAPLEX_CACHE_DIR": str(world.folder / "cache"),
    }
    start = ["-c", program] if program else ["-m", "loraplex"]
    argv = [sys.executable, *start, "adapters", "push", str(folder), "--as", f"{TENANT}/bot", *flags]
    return subprocess.Popen(
        argv,
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_first_parts(world: CrashWorld) -> None:
    """Wait until the first part of each file has arrived."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for note in (world.folder / "cache" / "uploads").glob("[0-9a-f]*"):
            path = f"/api/v1/tenants/{TENANT}/adapters/bot/uploads/{json.loads(note.read_bytes())['upload']}"
            with world.client() as client:
                parts = client.connection.send("GET", path).json()["parts"]
            if sum(part["received"] for part in parts) == 2:
                return
        time.sleep(0.05)
    raise AssertionError("the first parts have not arrived")


def test_push_that_was_killed_goes_on_where_it_was(world: CrashWorld) -> None:
    folder = LargeAdapter("big", 48, MODULES[:2]).write(world.folder / "adapter")
    cut = start_push(world, folder, "--resumable", program=_STALLING)
    wait_for_first_parts(world)
    cut.kill()
    cut.communicate(timeout=30)
    pushed = start_push(world, folder, "--resumable", "--wait", "60")
    out, told = pushed.communicate(timeout=120)
    assert pushed.returncode == 0, told
    assert out == ""
    assert f"{TENANT}/bot@1 is ready" in told
    assert "16.8 MB of 25.2 MB have arrived" in told
    with world.client() as client:
        version = client.get_version(TENANT, "bot", 1)
        pulled = world.folder / "pulled"
        pulled.mkdir()
        client.download_all(version, pulled, lambda _: None)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert hash_file(pulled / name) == hash_file(folder / name)
    assert list((world.folder / "cache" / "uploads").iterdir()) == []


def test_memory_of_a_push_does_not_grow_with_the_adapter(world: CrashWorld) -> None:
    peaks_mib = []
    for rank, modules in ((4, MODULES[:1]), (64, MODULES)):
        folder = LargeAdapter("big", rank, modules).write(world.folder / f"adapter-{rank}")
        pushed = start_push(world, folder, "--resumable", "--json", "--wait", "60", program=_MEASURED)
        out, told = pushed.communicate(timeout=120)
        assert pushed.returncode == 0, told
        assert json.loads(out)["state"] == "ready"
        peaks_mib.append(int(told.split("VmHWM:")[1].split()[0]) / 1024)
    assert peaks_mib[1] - peaks_mib[0] < 16, peaks_mib


def test_push_of_what_is_refused_shows_the_report(world: CrashWorld) -> None:
    adapter = LargeAdapter("big", 4, MODULES[:1])
    folder = adapter.write(world.folder / "adapter")
    (folder / "adapter_config.json").write_bytes(adapter.config.replace(b'"r":4', b'"r":5'))
    pushed = start_push(world, folder, "--resumable")
    _, told = pushed.communicate(timeout=120)
    assert pushed.returncode == 1
    assert "rank_mismatch" in told
    assert "fail" in told
    with world.client() as client, pytest.raises(ClientError, match="adapter"):
        client.get_adapter(TENANT, "bot")


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
