"""Backups of a platform that works meanwhile, and of one that is killed with `kill -9`."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from backup_world import Silent, build_source, find_artifacts, make_platform, push, running_registry
from loraplex.backup.create import create
from loraplex.backup.errors import BackupError
from loraplex.backup.verify import audit, verify

TESTS = Path(__file__).resolve().parents[1]
_KILLS = """
import os, signal, sys, traceback
from pathlib import Path
from backup_world import Silent, build_source
from loraplex.backup.create import create
from loraplex.backup.restore import restore
from loraplex.backup.verify import verify

class Deadly(Silent):
    "Kills its process at the moment of a number."
    def begin(self, what, total):
        self.advance(0)
    def advance(self, count):
        self.num_bytes += 1
        if self.num_bytes > moment:
            os.kill(os.getpid(), signal.SIGKILL)

data, folder = Path(sys.argv[1]), Path(sys.argv[2])
acts = {
    "backup": lambda to, watcher: create(build_source(data), to, watcher),
    "new": lambda to, watcher: restore(folder / "backup", to, watcher),
}
for name, act in acts.items():
    target = folder / name
    for moment in range(0, 1000, 3):
        child = os.fork()
        if child == 0:
            try:
                act(target, Deadly())
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (name, moment, status)
        assert not target.exists(), (name, moment)
        assert not any((left / "backup.json").exists() for left in folder.iterdir() if left.name[0] == "."), moment
    assert not list(folder.glob(f".{name}.*")), "what was left is gone"
    print(name, moment)
assert verify(folder / "backup", Silent())[1] == []
"""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A platform at rest that no test changes."""
    return make_platform(tmp_path_factory.mktemp("origin") / "data")


@pytest.fixture
def platform(origin: Path, tmp_path: Path) -> Path:
    """A platform of this test alone."""
    return Path(shutil.copytree(origin, tmp_path / "data"))


def test_kill_leaves_nothing_that_looks_whole(platform: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kills"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _KILLS, platform, folder],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    moments = {name: int(moment) for name, moment in map(str.split, done.stdout.splitlines())}
    assert min(moments.values()) > 10, "it was killed in the middle of each"


async def test_uploads_go_on_while_a_backup_is_made(platform: Path, tmp_path: Path) -> None:
    async with running_registry(platform) as world:
        uploads = [push(world, "team-c", seed, promote="always") for seed in range(3, 9)]
        making = asyncio.to_thread(create, build_source(platform), tmp_path / "b", Silent())
        manifest, *_ = await asyncio.gather(making, *uploads)
    assert verify(tmp_path / "b", Silent())[1] == []
    assert 2 <= manifest.num_artifacts <= 8
    found = audit(build_source(platform).database_url, f"file://{platform}/objects", None, Silent())
    assert (found.faults, found.num_artifacts, found.num_orphans) == ([], 8, 0)


class _Purging(Silent):
    """Purges a version, row and bytes, right after the database was copied."""

    def __init__(self, data_dir: Path, times: int, *, row: bool = True) -> None:
        super().__init__()
        self._data_dir = data_dir
        self._times = times
        self._row = row

    def begin(self, what: str, total: int | None) -> None:
        super().begin(what, total)
        if what == "Copying adapters" and self._times:
            self._times -= 1
            _purge(self._data_dir, row=self._row)


def _purge(data_dir: Path, *, row: bool) -> None:
    gone = next(find_artifacts(data_dir / "objects"))
    shutil.rmtree(gone)
    with contextlib.closing(sqlite3.connect(data_dir / "loraplex.db")) as connection:
        if row:
            for guard in ("guard_adapter_version_targeted", "guard_alias_targets", "guard_alias_revision"):
                connection.execute(f"DROP TRIGGER IF EXISTS {guard}")
            connection.execute("UPDATE alias SET targets = '[]'")
            connection.execute(
                "UPDATE adapter_version SET state = 'purged', retired_at = created_at WHERE digest = ?",
                (f"sha256:{gone.name}",),
            )
            connection.commit()


def test_what_is_purged_meanwhile_makes_it_begin_again_from_the_newest_database(platform: Path, tmp_path: Path) -> None:
    watcher = _Purging(platform, 1)
    manifest = create(build_source(platform), tmp_path / "b", watcher)
    assert watcher.stages.count("Copying the database") == 2
    assert (manifest.num_artifacts, manifest.damaged) == (1, ())
    assert verify(tmp_path / "b", Silent())[1] == []


def test_what_is_lost_meanwhile_and_still_named_is_damage(platform: Path, tmp_path: Path) -> None:
    manifest = create(build_source(platform), tmp_path / "b", _Purging(platform, 1, row=False))
    assert (manifest.num_artifacts, [fault.kind for fault in manifest.damaged]) == (1, ["missing"])


def test_a_disk_that_is_full_in_the_middle_leaves_nothing(
    platform: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Silent):
        def advance(self, count: int) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(BackupError, match="No space left"):
        create(build_source(platform), tmp_path / "b", Full())
    assert not list(tmp_path.glob("*b*partial*"))
    assert not (tmp_path / "b").exists()
