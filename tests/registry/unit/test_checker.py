"""Checks run in forks of one process: the same verdict, killed in time, without secrets, a refusal where they die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex_registry.errors import UnavailableError
from loraplex_registry.peft.spec import ModuleSpec
from loraplex_registry.uploads import checker as module
from loraplex_registry.uploads.check_process import Verdict
from loraplex_registry.uploads.checker import ProcessChecker
from registry_world import ThreadChecker, build_tiny_spec

Write = Callable[[str], None]


def _files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(folder.iterdir())}


async def check(checker: ProcessChecker, folder: Path, timeout_s: float = 30) -> Verdict:
    return await checker.check(_files(folder), build_tiny_spec(), forced_base=False, timeout_s=timeout_s)


def failures(verdict: Verdict) -> list[str]:
    assert (verdict.plan is None) == (verdict.report.verdict == "fail")
    return [check.name for check in verdict.report.checks if check.verdict == "fail"]


@pytest.fixture
async def checker() -> AsyncIterator[ProcessChecker]:
    each = ProcessChecker(1)
    yield each
    each.close()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Write:
    """Makes the server's forks run other work instead of the checks: the body of a function of the job's bytes."""

    def write(body: str) -> None:
        (tmp_path / "other.py").write_text(
            "import os, signal, subprocess, sys, time\n"
            "from loraplex_registry.uploads import check_process\n"
            f"def answer_job(data):\n    {body}\n    return b''\n"
            "check_process.answer_job = answer_job\n"
            "sys.exit(check_process.main())\n"
        )
        monkeypatch.setattr(module, "_MODULE", "other")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


async def test_process_and_thread_say_the_same(checker: ProcessChecker, make_adapter: Any) -> None:
    whole = make_adapter(1)
    for folder in (whole, whole, make_adapter(2, lora_alpha=0.0)):
        files = _files(folder)
        for changed in (files, {"adapter_config.json": files["adapter_config.json"]}):
            verdicts = [
                await each.check(changed, build_tiny_spec(), forced_base=False, timeout_s=30)
                for each in (checker, ThreadChecker())
            ]
            assert msgspec.json.encode(verdicts[0]) == msgspec.json.encode(verdicts[1])
    assert checker.num_starts == 1


async def test_templates_and_expressions_are_judged_in_forks_of_forks(
    checker: ProcessChecker, make_adapter: Any
) -> None:
    folder = make_adapter(1)
    (folder / "chat_template.jinja").write_text("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}")
    assert failures(await check(checker, folder)) == ["template"]
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert failures(await check(checker, folder)) == []
    config = msgspec.json.decode((folder / "adapter_config.json").read_bytes())
    (folder / "adapter_config.json").write_bytes(msgspec.json.encode(config | {"target_modules": "(a*)*" * 20 + "b"}))
    assert failures(await check(checker, folder)) == ["target_modules"]


async def test_slow_check_is_killed_with_its_helpers(
    checker: ProcessChecker, make_adapter: Any, work: Write, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    work(
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(60)"
    )
    with pytest.raises(UnavailableError, match="no verdict after 1 s"):
        await check(checker, make_adapter(1), 1)
    await _gone(*(int(pid) for pid in pids.read_text().split()))
    assert checker.num_starts == 1


async def test_a_caller_that_gives_up_leaves_nothing_behind(
    checker: ProcessChecker, make_adapter: Any, work: Write, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    work(f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    task = asyncio.create_task(check(checker, make_adapter(1)))
    await _until(lambda: pid.exists() and pid.read_text())
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await _gone(int(pid.read_text()))


async def _gone(*pids: int) -> None:
    await _until(lambda: not any(_is_running(pid) for pid in pids))


async def _until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(3)", "x = bytearray(8 << 30)", "return b'{'"])
async def test_files_that_end_the_check_are_refused(
    checker: ProcessChecker, make_adapter: Any, work: Write, end: str
) -> None:
    work(end)
    for _ in range(2):
        assert failures(await check(checker, make_adapter(1))) == ["format"]
    assert checker.num_starts == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_server_that_is_gone_or_stuck_is_replaced(
    checker: ProcessChecker, make_adapter: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(module, "_START_S", 1.0)
    assert failures(await check(checker, make_adapter(1))) == []
    assert checker.pid is not None
    os.kill(checker.pid, number)
    assert failures(await check(checker, make_adapter(2))) == []
    assert checker.num_starts == 2


async def test_a_server_killed_in_the_middle_of_a_check_is_no_fault_of_the_files(
    checker: ProcessChecker, make_adapter: Any, work: Write, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    work(f"if not os.path.exists({str(first)!r}): open({str(first)!r}, 'w').close(); time.sleep(60)")
    task = asyncio.create_task(check(checker, make_adapter(1)))
    await _until(first.exists)
    assert checker.pid is not None
    os.kill(checker.pid, signal.SIGKILL)
    # the second fork answers nothing, which is the files' fault
    assert failures(await task) == ["format"]
    assert checker.num_starts == 2


async def test_a_server_that_never_starts_is_unavailable(
    checker: ProcessChecker, make_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MODULE", "no_such_module")
    with pytest.raises(UnavailableError, match="does not stay"):
        await check(checker, make_adapter(1))


async def test_many_checks_share_one_server(make_adapter: Any) -> None:
    checker = ProcessChecker(3)
    try:
        folders = [make_adapter(seed) for seed in range(4)]
        verdicts = await asyncio.gather(*(check(checker, folder) for folder in folders * 3))
        assert [failures(verdict) for verdict in verdicts] == [[]] * 12
        assert len({verdict.plan.digest for verdict in verdicts if verdict.plan}) == 4
        assert checker.num_starts == 1
    finally:
        checker.close()


async def test_a_check_that_ends_is_answered_while_a_later_one_runs(
    make_adapter: Any, work: Write, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    slow, fast = make_adapter(1), make_adapter(2)
    work(
        f"if {slow.name!r} in data.decode(): open({str(begun)!r}, 'w').close(); time.sleep(60)\n"
        f"    while not os.path.exists({str(begun)!r}): time.sleep(0.01)"
    )
    checker = ProcessChecker(2)
    try:
        early = asyncio.create_task(check(checker, fast))
        await _until(lambda: checker.pid and _num_children(checker.pid) == 2)
        late = asyncio.create_task(check(checker, slow))
        async with asyncio.timeout(60):
            assert failures(await early) == ["format"]
        late.cancel()
    finally:
        checker.close()


def _num_children(pid: int) -> int:
    return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@pytest.mark.endure
async def test_memory_stays_flat_however_large_the_adapter_is(
    checker: ProcessChecker, make_adapter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: Any
) -> None:
    size = 2 << 30 if request.config.getoption("--endure") else 384 << 20
    limit = 192 << 20
    (tmp_path / "other.py").write_text(
        "import sys\nfrom loraplex_registry.uploads import check_process\n"
        f"check_process._MAX_MEMORY_BYTES = {limit}\nsys.exit(check_process.main())\n"
    )
    monkeypatch.setattr(module, "_MODULE", "other")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = make_adapter(1)
    rows = size // 2 // 1024
    config = msgspec.json.decode((folder / "adapter_config.json").read_bytes())
    (folder / "adapter_config.json").write_bytes(msgspec.json.encode(config | {"modules_to_save": ["lm_head"]}))
    append_tensor(folder / "adapter_model.safetensors", "base_model.model.lm_head.weight", rows, 1024)
    spec = build_tiny_spec()
    modules = spec.modules | {"lm_head": ModuleSpec(rows, 1024, "head")}
    spec = msgspec.structs.replace(spec, modules=modules, max_saved_bytes=size)
    verdict = await checker.check(_files(folder), spec, forced_base=True, timeout_s=300)
    assert failures(verdict) == []
    assert verdict.plan is not None
    assert verdict.plan.weights[0].ref.shape == (rows, 1024)


def append_tensor(path: Path, name: str, rows: int, columns: int) -> None:
    """Add a float16 tensor of zeros, which take no room on the disk."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = msgspec.json.decode(data[8 : 8 + size]), data[8 + size :]
    stop = len(body) + rows * columns * 2
    header[name] = {"dtype": "F16", "shape": [rows, columns], "data_offsets": [len(body), stop]}
    text = msgspec.json.encode(header)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    os.truncate(path, 8 + len(text) + stop)


async def test_check_sees_no_secret(
    checker: ProcessChecker, make_adapter: Any, monkeypatch: pytest.MonkeyPatch, work: Write, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    work(f"open({str(seen)!r}, 'w').write(repr(dict(os.environ)) + ' '.join(os.listdir('/proc/self/fd')))")
    monkeypatch.setitem(os.environ, "LORAPLEX_ENGINE_KEY", "hush-hush")
    monkeypatch.setitem(os.environ, "AWS_SECRET_ACCESS_KEY", "hush-hush")
    await check(checker, make_adapter(1))
    assert "hush" not in seen.read_text()
    assert "PATH" in seen.read_text()
