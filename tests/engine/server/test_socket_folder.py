"""The folder between front and core: private, gone at the end, and swept when its owner was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from loraplex_engine.server.socket_folder import socket_folder, sweep

CHILD = """
import os, signal
from loraplex_engine.server.socket_folder import socket_folder
with socket_folder() as folder:
    (folder / "0-to-core").touch()
    print(folder, flush=True)
    input()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def age(folder: Path) -> None:
    os.utime(folder, (0, 0))


def test_a_killed_process_s_folder_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    age(left)
    with socket_folder():
        assert left.exists(), "its process lives"
    process.communicate("\n", timeout=10)
    assert left.exists()
    age(left)
    with socket_folder() as folder:
        assert list(tmp_path.iterdir()) == [folder]
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_young_and_foreign_things_stay(tmp_path: Path) -> None:
    young, link, other, file = (tmp_path / name for name in ("lpx-core-a", "lpx-core-b", "lpx-old", "lpx-core-c"))
    young.mkdir()
    other.mkdir()
    link.symlink_to(other)
    file.touch()
    age(other)
    age(file)
    sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([young, link, other, file])
