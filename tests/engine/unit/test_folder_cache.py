"""The disk cache under its cap: exact in any order of acts, whole after any death."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex_engine.lora import folder_cache
from loraplex_engine.lora.folder_cache import FolderCache, NoRoomError
from loraplex_registry.wire.digest import artifact_path

CAP = 100


def digest_of(index: int) -> str:
    """Two in each of the parents that digests share."""
    return f"sha256:{index // 2:04x}{index:060x}"


def put(cache: FolderCache, index: int, num_bytes: int) -> None:
    """Fetch a folder of that size."""
    with cache.hold(digest_of(index)), cache.stage(num_bytes) as staged:
        (staged / "files").write_bytes(bytes(num_bytes))
        cache.publish(digest_of(index), staged)


def present(root: Path) -> set[int]:
    """Which of the folders lie there."""
    return {int(folder.name, 16) & 0xFFFF for folder in root.glob("sha256/*/*/*")}


class CacheMachine(RuleBasedStateMachine):
    """Fetches, uses, holds, removals and restarts against a list from least to most recently used."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []
        self.sizes: dict[int, int] = {}
        self.held: dict[int, ExitStack] = {}
        self.num_evictions = 0

        self.root = Path(tempfile.mkdtemp())
        self.cache = FolderCache(self.root, CAP)

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(index=st.integers(0, 7), num_bytes=st.integers(0, CAP + 20))
    def fetch(self, index: int, num_bytes: int) -> None:
        if index in self.sizes:
            return
        room = CAP - num_bytes
        kept = sum(self.sizes[i] for i in self.held if i in self.sizes)
        victims = []
        if num_bytes <= CAP:
            total = sum(self.sizes.values())
            for other in [i for i in self.order if i not in self.held]:
                if total <= room:
                    break
                victims.append(other)
                total -= self.sizes[other]
        if num_bytes > CAP or kept > room:
            with pytest.raises(NoRoomError):
                put(self.cache, index, num_bytes)
        else:
            put(self.cache, index, num_bytes)
            self.order.append(index)
            self.sizes[index] = num_bytes
        for other in victims:
            self._forget(other)
            self.num_evictions += 1

    @rule(index=st.integers(0, 7))
    def hold(self, index: int) -> None:
        if index not in self.held:
            self.held[index] = ExitStack()
            self.held[index].enter_context(self.cache.hold(digest_of(index)))
            if index in self.sizes:
                self.order.remove(index)
                self.order.append(index)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.sampled_from(sorted(self.held)))).close()

    @rule(index=st.integers(0, 7))
    def remove(self, index: int) -> None:
        self.cache.remove(digest_of(index))
        self._forget(index)

    @precondition(lambda self: not self.held)
    @rule()
    def restart(self) -> None:
        assert self.cache.take_evictions() == self.num_evictions
        self.num_evictions = 0
        self.cache = FolderCache(self.root, CAP)

    @invariant()
    def is_exact(self) -> None:
        self.cache.check_integrity()
        assert present(self.root) == set(self.sizes)
        assert self.cache.num_bytes == sum(self.sizes.values()) <= CAP
        assert self.cache.num_folders == len(self.sizes)

    def _forget(self, index: int) -> None:
        if index in self.sizes:
            del self.sizes[index]
            self.order.remove(index)


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_cache, "_ROOM_S", 0.0)
    # nothing here is about power cuts
    monkeypatch.setattr(folder_cache, "sync", lambda path: None)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, CAP)
    for index in range(4):
        put(cache, index, 25)
        os.utime(tmp_path / artifact_path(digest_of(index)), ns=(index, index))
    with cache.hold(digest_of(0)):
        pass
    put(FolderCache(tmp_path, CAP), 9, 40)
    assert present(tmp_path) == {0, 3, 9}


def test_a_lower_cap_holds_from_the_start(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, CAP)
    for index in range(4):
        put(cache, index, 25)
    lower = FolderCache(tmp_path, 60)
    assert (lower.num_bytes, lower.num_folders, lower.take_evictions(), lower.take_evictions()) == (50, 2, 2, 0)


def test_a_fetch_waits_for_a_load_to_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_cache, "_ROOM_S", 30.0)
    cache = FolderCache(tmp_path, CAP)
    put(cache, 1, 80)
    with cache.hold(digest_of(1)):
        waiting = threading.Thread(target=put, args=(cache, 2, 80))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        assert present(tmp_path) == {1}
    waiting.join(10)
    assert present(tmp_path) == {2}


def test_what_another_process_put_here_is_counted_when_used(tmp_path: Path) -> None:
    cache, other = FolderCache(tmp_path, CAP), FolderCache(tmp_path, CAP)
    put(cache, 1, 60)
    put(other, 2, 60)
    with cache.hold(digest_of(2)):
        assert (present(tmp_path), cache.num_bytes) == ({2}, 60)
    cache.check_integrity()


def test_what_another_process_pushed_out_is_no_longer_counted(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, CAP)
    put(cache, 1, 60)
    FolderCache(tmp_path, CAP).remove(digest_of(1))
    with cache.hold(digest_of(1)) as folder:
        assert not folder.exists()
        assert cache.num_bytes == 0


def test_what_is_no_folder_of_a_digest_does_not_count_and_does_not_hurt(tmp_path: Path) -> None:
    put(FolderCache(tmp_path, CAP), 1, 30)
    home = (tmp_path / artifact_path(digest_of(1))).parent
    (home / ".DS_Store").write_bytes(b"1234")
    (home / ("f" * 64)).mkdir()
    (home / ("0" * 64)).write_bytes(b"1234")
    cache = FolderCache(tmp_path, CAP)
    assert (cache.num_folders, cache.num_bytes) == (1, 30)
    put(cache, 2, CAP)
    cache.check_integrity()
    assert sorted(path.name for path in home.iterdir()) == [".DS_Store", "0" * 64, "f" * 64]


def test_a_fetch_that_fails_gives_its_room_back(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, CAP)
    for _ in range(3):
        with pytest.raises(FileNotFoundError), cache.stage(60) as staged:
            cache.publish(digest_of(1), staged / "never written")
    cache.check_integrity()
    put(cache, 1, 60)


def test_a_running_fetch_of_another_process_is_not_swept(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path, CAP)
    with cache.stage(10) as staged:
        FolderCache(tmp_path, CAP)
        assert staged.is_dir()


_DIE = """
import os, sys
from pathlib import Path
from loraplex_engine.lora import folder_cache
from loraplex_engine.lora.folder_cache import FolderCache
sys.path.insert(0, sys.argv[1])
from test_folder_cache import CAP, put
cache = FolderCache(Path(sys.argv[2]), CAP)
die = lambda *args, **kwargs: os._exit(9)
stage = sys.argv[3]
if stage == "while it is fetched":
    folder_cache.FolderCache.publish = die
elif stage == "before it is published":
    rename = Path.rename
    Path.rename = lambda self, to: die() if ".fetch-" in str(self) else rename(self, to)
elif stage == "after it is published":
    folder_cache.sync = die
elif stage == "before an old one goes":
    Path.rename = die
elif stage == "before an old one is deleted":
    folder_cache.shutil.rmtree = die
else:
    def half(path, **kwargs):
        (Path(path) / "files").unlink()
        die()
    folder_cache.shutil.rmtree = half
put(cache, 3, 60)
"""


@pytest.mark.parametrize(
    ("stage", "left"),
    [
        ("while it is fetched", {2}),
        ("before it is published", {2}),
        ("after it is published", {2, 3}),
        ("before an old one goes", {1, 2}),
        ("before an old one is deleted", {2}),
        ("while an old one is deleted", {2}),
    ],
)
def test_a_process_that_dies_leaves_whole_folders_and_an_exact_account(
    tmp_path: Path, stage: str, left: set[int]
) -> None:
    root = tmp_path / "adapters"
    cache = FolderCache(root, CAP)
    put(cache, 1, 30)
    put(cache, 2, 40)
    os.utime(root / artifact_path(digest_of(1)), (0, 0))
    argv = [sys.executable, "-c", _DIE, str(Path(__file__).parent), str(root), stage]
    assert subprocess.run(argv, check=False, timeout=60).returncode == 9
    assert present(root) == left
    restarted = FolderCache(root, CAP)
    restarted.check_integrity()
    sizes = {1: 30, 2: 40, 3: 60}
    assert restarted.num_bytes == sum(sizes[index] for index in left)
    assert [path for path in root.iterdir() if path.name != "sha256"] == []
    put(restarted, 4, 60)
