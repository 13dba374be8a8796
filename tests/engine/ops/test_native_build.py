"""The native library: built once, found again, and never a reason not to start."""

from __future__ import annotations

import fcntl
import stat
import threading
from pathlib import Path

import pytest

from loraplex_engine.ops.native import build
from loraplex_engine.ops.native.build import NativeBuildError, find_or_build_library, native_status

# as it finds out first; what it found out is kept for the process
find_status = native_status.__wrapped__


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> Path:
    """A compiler that writes `library` to its -o and notes each call beside itself."""
    script = tmp_path / "fake-g++"
    script.write_text(
        '#!/bin/sh\necho call >> "$0.calls"\nwhile [ "$1" != "-o" ]; do shift; done\necho library > "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return script


def calls(compiler: Path) -> int:
    log = Path(f"{compiler}.calls")
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_the_library_is_built_once_and_found_again(tmp_path, compiler, capsys):
    first = find_or_build_library(tmp_path / "cache")
    assert first.read_text() == "library\n"
    assert "building the native CPU ops" in capsys.readouterr().err
    assert find_or_build_library(tmp_path / "cache") == first
    assert calls(compiler) == 1
    assert sorted(path.name for path in first.parent.iterdir()) == ["libloraplex_ops.so", "lock"]


def test_another_source_or_cpu_is_another_library(tmp_path, compiler, monkeypatch):
    one = find_or_build_library(tmp_path)
    monkeypatch.setattr(build, "_cpu_flags", lambda: "flags: none of the usual")
    other = find_or_build_library(tmp_path)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert len({one, other, find_or_build_library(tmp_path)}) == 3
    assert calls(compiler) == 3


def test_a_lock_left_by_a_dead_process_holds_nothing_up(tmp_path, compiler):
    folder = tmp_path / "native" / build._build_key()
    folder.mkdir(parents=True)
    folder.joinpath("lock").write_text("4711")
    assert find_or_build_library(tmp_path).exists()


def test_a_lock_that_is_never_released_only_delays(tmp_path, compiler, monkeypatch):
    monkeypatch.setattr(build, "LOCK_TIMEOUT_S", 0.3)
    folder = tmp_path / "native" / build._build_key()
    folder.mkdir(parents=True)
    with folder.joinpath("lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert find_or_build_library(tmp_path).exists()


def test_two_that_start_at_once_build_once(tmp_path, compiler):
    threads = [threading.Thread(target=find_or_build_library, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls(compiler) == 1


def test_a_failing_compiler_leaves_nothing_and_says_why(tmp_path, compiler):
    compiler.write_text('#!/bin/sh\necho "ops.cpp:7: error: no such thing" >&2\nexit 1\n')
    with pytest.raises(NativeBuildError, match="no such thing"):
        find_or_build_library(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").rglob("*.so")] == []


def test_a_missing_compiler_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeBuildError, match=r"install it .*g\+\+"):
        find_or_build_library(tmp_path)


def test_the_environment_switches_to_the_torch_form(monkeypatch):
    monkeypatch.setenv("LORAPLEX_NATIVE", "0")
    status = find_status()
    assert status.form == "torch"
    assert status.reason.startswith("switched off")


def test_without_a_compiler_the_torch_form_serves_and_says_so(tmp_path, monkeypatch):
    for name, value in {"LORAPLEX_NATIVE": "1", "LORAPLEX_CACHE_DIR": str(tmp_path), "CXX": "/nowhere/g++"}.items():
        monkeypatch.setenv(name, value)
    status = find_status()
    assert status.form == "torch"
    assert "/nowhere/g++" in status.reason


def test_a_damaged_library_is_built_again(tmp_path, compiler, monkeypatch):
    find_or_build_library(tmp_path).write_text("half a lib")
    with pytest.raises(OSError, match="libloraplex_ops"):
        build._load(tmp_path)
    assert calls(compiler) == 2
