"""The core's end of the loader's pipe, and a real process behind it that is killed at any moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest

from core_world import KEY, ArtifactServer
from loraplex_engine.bases.folder import load_spec
from loraplex_engine.bases.pull import pull
from loraplex_engine.lora.disk import AdapterDisk
from loraplex_engine.lora.loader import LoaderProcess
from loraplex_engine.lora.packed import LoadDone, LoadFailed, PackedAdapter
from loraplex_registry.peft.spec import BaseSpec
from support import ALL_TARGETS, write_adapter

BASE = BaseSpec("tiny", (), "sha256:0", "", 8, {})


def test_process_that_dies_between_facts_and_descriptor_fails_the_load_it_owes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    monkeypatch.setattr(LoaderProcess, "_spawn", lambda self: setattr(self, "_pipe", ours))
    loader = LoaderProcess(cache_dir="", base=BASE, base_dir="", dtype="float32", max_disk_bytes=1 << 30)
    loader.start("sha256:x")
    loader.start("sha256:y")
    for _ in range(2):
        theirs.recv_bytes()
    theirs.send_bytes(msgspec.msgpack.encode(LoadDone("sha256:x", 64, 8, (), 0.0, 0.0, 0.0)))
    theirs.close()
    results = loader.take_finished()
    assert [(result.digest, type(result)) for result in results] == [
        ("sha256:x", LoadFailed),
        ("sha256:y", LoadFailed),
    ]


@pytest.mark.parametrize("message", [b"\xc1", b"\x82", b"\x91" * 100_000], ids=["text", "cut", "nested"])
def test_process_that_says_nonsense_fails_the_loads_it_owes_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch, message: bytes
) -> None:
    ends: list[tuple[Connection[bytes, bytes], Connection[bytes, bytes]]] = []

    def spawn(loader: LoaderProcess) -> None:
        ends.append(Pipe())
        loader._pipe = ends[-1][0]

    monkeypatch.setattr(LoaderProcess, "_spawn", spawn)
    loader = LoaderProcess(cache_dir="", base=BASE, base_dir="", dtype="float32", max_disk_bytes=1 << 30)
    loader.start("sha256:x")
    ends[0][1].send_bytes(message)
    said = "The loader process said what cannot be read and is restarted."
    assert loader.take_finished() == [LoadFailed("sha256:x", "fetch", "adapter_loading", said, is_content=False)]
    assert ends[0][0].closed
    assert len(ends) == 2
    loader.start("sha256:y")
    ends[1][1].send_bytes(msgspec.msgpack.encode(LoadFailed("sha256:y", "fetch", "a", "b", is_content=False)))
    assert [result.digest for result in loader.take_finished() if isinstance(result, LoadFailed)] == ["sha256:y"]
    for pair in ends:
        for end in pair:
            end.close()


@pytest.fixture(scope="module")
def base(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pull(str(tiny_llama), tmp_path_factory.mktemp("cache"))


@pytest.fixture
def registry() -> Iterator[ArtifactServer]:
    server = ArtifactServer()
    yield server
    server.resume.set()
    server.close()


def _wait(loader: LoaderProcess) -> PackedAdapter | LoadFailed:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if results := loader.take_finished():
            return results[0]
        time.sleep(0.005)
    raise AssertionError("the loader says nothing")


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


@pytest.mark.endure
@pytest.mark.parametrize("delay_s", [None, 0.0, 0.01, 0.03, 0.06])
def test_a_loader_killed_at_any_moment_fails_the_load_and_the_next_one_starts_clean(
    base: Path,
    registry: ArtifactServer,
    tmp_path: Path,
    delay_s: float | None,
    long: Callable[[float, float], float],
) -> None:
    if delay_s in (0.01, 0.06) and not long(0, 1):
        pytest.skip("`make endure`: one moment of each kind is tried")
    spec = load_spec(base)
    folder = write_adapter(tmp_path / "a", base, rank=16, targets=ALL_TARGETS)
    digest = AdapterDisk(tmp_path / "other", spec, None).put(folder)
    registry.folders[digest] = folder
    facts = {"base": spec, "base_dir": str(base), "dtype": "float32", "max_disk_bytes": 1 << 30}
    loader = LoaderProcess(cache_dir=str(tmp_path), registry_url=registry.url, engine_key=KEY, **facts)
    # the process is up when it has answered once
    loader.start(f"sha256:{'0' * 64}")
    assert isinstance(_wait(loader), LoadFailed)
    if delay_s is None:
        registry.stalled = digest
    loader.start(digest)
    time.sleep(delay_s or 0.1)
    assert loader._process is not None
    loader._process.kill()
    loader._process.wait()
    result = _wait(loader)
    if isinstance(result, LoadFailed):
        assert (result.digest, result.is_content) == (digest, False)
        assert result.message == "The loader process died and is restarted."
    registry.stalled = ""
    registry.resume.set()
    loader.start(digest)
    while isinstance(result := _wait(loader), LoadFailed):
        loader.start(digest)
    loader.close()
    assert isinstance(result, PackedAdapter)
    assert (result.facts.disk_adapters, result.facts.disk_evictions) == (1, 0)
    AdapterDisk(tmp_path / "adapters", spec, None).cache.check_integrity()


def test_a_loader_that_hangs_is_found_by_its_silence_and_one_that_is_slow_is_left_alone(
    base: Path, registry: ArtifactServer, tmp_path: Path
) -> None:
    spec = load_spec(base)
    folder = write_adapter(tmp_path / "a", base, rank=16, targets=ALL_TARGETS)
    digest = AdapterDisk(tmp_path / "other", spec, None).put(folder)
    registry.folders[digest] = folder
    facts = {"base": spec, "base_dir": str(base), "dtype": "float32", "max_disk_bytes": 1 << 30}
    now = [0.0]
    loader = LoaderProcess(
        cache_dir=str(tmp_path), registry_url=registry.url, engine_key=KEY, silence_s=60, clock=lambda: now[0], **facts
    )
    registry.stalled = digest
    loader.start(digest)
    slow = loader._process
    for _ in range(2):
        now[0] += 59
        _wait_until(lambda: loader.take_finished() == [] and loader._heard_at == now[0])
    assert slow is not None
    os.kill(slow.pid, signal.SIGSTOP)
    time.sleep(0.1)
    assert loader.take_finished() == []
    now[0] += 61
    (failed,) = loader.take_finished()
    assert isinstance(failed, LoadFailed)
    assert (failed.digest, failed.is_content, slow.poll()) == (digest, False, -signal.SIGKILL)
    registry.stalled = ""
    registry.resume.set()
    loader.start(digest)
    while isinstance(result := _wait(loader), LoadFailed):
        loader.start(digest)
    loader.close()
    assert isinstance(result, PackedAdapter)
