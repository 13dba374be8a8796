"""Checks run in a process of their own: the same verdict, killed in time, no secrets inside, refusal where they die."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex_registry.errors import UnavailableError
from loraplex_registry.uploads import checker
from loraplex_registry.uploads.checker import ProcessChecker
from registry_world import ThreadChecker, build_tiny_spec


def _files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(folder.iterdir())}


async def test_process_and_thread_say_the_same(make_adapter: Any) -> None:
    files = _files(make_adapter(1))
    for changed in (files, {"adapter_config.json": files["adapter_config.json"]}):
        verdicts = [
            await each.check(changed, build_tiny_spec(), forced_base=False, timeout_s=30)
            for each in (ProcessChecker(1), ThreadChecker())
        ]
        assert msgspec.json.encode(verdicts[0]) == msgspec.json.encode(verdicts[1])
        assert (verdicts[0].plan is None) is (len(changed) == 1)


async def test_slow_check_is_killed_with_its_helpers(
    make_adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "sleeper.py"
    pids = tmp_path / "pids"
    program.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(checker, "_MODULE", "sleeper")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="no verdict after 1 s"):
        await ProcessChecker(1).check(_files(make_adapter(1)), build_tiny_spec(), forced_base=False, timeout_s=1)
    deadline = time.monotonic() + 5
    while any(_is_running(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return f"/proc/{pid}" and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(3)", "x = bytearray(8 << 30)"])
async def test_files_that_end_the_check_are_refused(
    make_adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str
) -> None:
    program = (
        "import os, sys\n"
        "from loraplex_registry.uploads.check_process import _limit_resources\n"
        f"_limit_resources()\nsys.stdin.read()\n{end}\n"
    )
    (tmp_path / "dying.py").write_text(program)
    monkeypatch.setattr(checker, "_MODULE", "dying")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    verdict = await ProcessChecker(1).check(_files(make_adapter(1)), build_tiny_spec(), forced_base=False, timeout_s=30)
    assert verdict.plan is None
    assert [check.name for check in verdict.report.checks if check.verdict == "fail"] == ["format"]


async def test_check_sees_no_secret(make_adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    (tmp_path / "peek.py").write_text(f"import os, json\njson.dump(dict(os.environ), open({str(seen)!r}, 'w'))\n")
    monkeypatch.setattr(checker, "_MODULE", "peek")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(os.environ, "LORAPLEX_ENGINE_KEY", "hush-hush")
    monkeypatch.setitem(os.environ, "AWS_SECRET_ACCESS_KEY", "hush-hush")
    with pytest.raises(msgspec.DecodeError):
        await ProcessChecker(1).check(_files(make_adapter(1)), build_tiny_spec(), forced_base=False, timeout_s=30)
    assert "hush" not in seen.read_text()
