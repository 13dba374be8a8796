from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console

from engine_installed import needs_engine
from loraplex.supervisor import backoff
from loraplex.supervisor.backoff import Backoff
from loraplex.supervisor.base import PulledBase
from loraplex.supervisor.child import Child, ChildSpec
from loraplex.supervisor.data_folder import DataFolder
from loraplex.supervisor.display import Display
from loraplex.supervisor.environment import build_environment, give_default_file
from loraplex.supervisor.errors import FolderInUseError, PartFailedError, StoppedError, UpError
from loraplex.supervisor.flag_check import check_engine_flags
from loraplex.supervisor.option import UpOptions
from loraplex.supervisor.part import Addresses, build_engine, build_gateway
from loraplex.supervisor.platform import check_binding, run_platform
from loraplex_registry.peft.spec import BaseSpec

SECRETS = ("LORAPLEX_SIGNING_KEY", "LORAPLEX_KEY_PEPPER", "LORAPLEX_ADMIN_KEY", "LORAPLEX_DATABASE_URL")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def options(tmp_path: Path, **changes: object) -> UpOptions:
    return UpOptions(data_dir=tmp_path, cache_dir=tmp_path / "cache", **changes)  # type: ignore[arg-type]


def base(tmp_path: Path) -> PulledBase:
    spec = BaseSpec(name="tiny", accepted_names=(), fingerprint="f", weights_digest="w", vocab_size=8, modules={})
    return PulledBase(tmp_path / "tiny", spec)


def test_waits_double_up_to_a_minute_and_start_over_after_a_good_run() -> None:
    backoff = Backoff()
    assert [backoff.next_wait_s(0.5) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [backoff.next_wait_s(61), backoff.next_wait_s(0)] == [1, 2]


def test_folder_and_its_secrets_are_private_and_kept(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    with folder.lock():
        public = folder.prepare(None).public_pem
    assert mode(folder.path) == 0o700
    secrets = [folder.path / name for name in ("signing.pem", "engine.key", "verify.pem")]
    assert {mode(path) for path in secrets} == {0o600}
    before = [path.read_bytes() for path in secrets]
    with folder.lock():
        assert folder.prepare(None).public_pem == public
    assert [path.read_bytes() for path in secrets] == before


def test_folder_serves_one_platform(tmp_path: Path) -> None:
    with DataFolder(tmp_path).lock(), pytest.raises(FolderInUseError, match="--data-dir"), DataFolder(tmp_path).lock():
        pass


def test_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UpError, match=r"Not a directory.*--data-dir"), DataFolder(tmp_path / "file" / "x").lock():
        pass


async def test_flag_that_is_not_built_is_refused_by_the_engines_sentence() -> None:
    assert (await check_engine_flags(("--max-loras", "4"), dict(os.environ))).max_lora_rank == 64
    with pytest.raises(UpError, match=r"^--quantization is 'fp8'.*not built yet; .*\.$"):
        await check_engine_flags(("--quantization", "fp8"), dict(os.environ) | {"LORAPLEX_UNHEARD_OF": "1"})


@pytest.mark.parametrize(
    ("flags", "env"), [(("--max-lora-rank", "128"), {}), ((), {"LORAPLEX_ENGINE_MAX_LORA_RANK": "128"})]
)
async def test_the_registry_is_told_the_rank_limit_of_the_engine(
    tmp_path: Path, flags: tuple[str, ...], env: dict[str, str]
) -> None:
    limits = await check_engine_flags(flags, dict(os.environ) | env)
    assert base(tmp_path).limit_rank(limits.max_lora_rank).spec.max_lora_rank == 128


@needs_engine
async def test_platform_that_is_stopped_while_it_starts_ends_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepare(*_: object) -> PulledBase:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
        return base(tmp_path)

    async def on_ready(_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("loraplex.supervisor.platform._prepare", prepare)
    give_addresses(monkeypatch)
    shown = io.StringIO()
    with pytest.raises(StoppedError) as caught:
        await run_platform(options(tmp_path), {}, Display(Console(file=shown, width=200)), on_ready)
    assert caught.value.exit_code == 130
    assert "Once more to stop at once" in shown.getvalue()


def give_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = Addresses("127.0.0.1", 1, 2)
    monkeypatch.setattr("loraplex.supervisor.platform.hold_addresses", lambda _: contextlib.nullcontext(addresses))


@needs_engine
async def test_only_a_signal_is_told_how_to_stop_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def prepare(*_: object) -> PulledBase:
        return base(tmp_path)

    async def fail(*_: object) -> None:
        raise PartFailedError("the engine has no memory")

    def build(*_: object) -> ChildSpec:
        return ChildSpec("part", (sys.executable, "-c", "import time; time.sleep(60)"), {}, tmp_path / "part.log")

    for name, value in (("_prepare", prepare), ("_wait_and_register", fail), ("build_gateway", build)):
        monkeypatch.setattr(f"loraplex.supervisor.platform.{name}", value)
    monkeypatch.setattr("loraplex.supervisor.platform.build_engine", build)
    give_addresses(monkeypatch)
    shown = io.StringIO()
    with pytest.raises(PartFailedError):
        await run_platform(options(tmp_path), {}, Display(Console(file=shown, width=200)), fail)
    assert "top" not in shown.getvalue()


def test_long_log_is_turned_over(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    with folder.lock():
        folder.prepare(None)
        with folder.log("engine").open("wb") as log:
            log.truncate(17 * 1024 * 1024)
        folder.prepare(None)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["engine.log.1"]


def test_engine_sees_no_secret_of_the_gateway(tmp_path: Path) -> None:
    environ = dict.fromkeys(SECRETS, "s3cr3t-value") | {
        "AWS_SECRET_ACCESS_KEY": "s3cr3t-value",
        "LORAPLEX_API_KEY": "s3cr3t-value",
    }
    spec = build_engine(options(tmp_path), environ, DataFolder(tmp_path), base(tmp_path), Addresses("127.0.0.1", 1, 2))
    assert "s3cr3t-value" not in spec.env.values()
    assert "s3cr3t-value" not in " ".join(spec.argv)
    assert spec.env["LORAPLEX_ENGINE_KEY_FILE"] == str(tmp_path.resolve() / "engine.key")
    assert spec.env["LORAPLEX_REGISTRY_URL"] == "http://127.0.0.1:1"


def test_secrets_of_parts_are_not_printed(tmp_path: Path) -> None:
    environ = {"LORAPLEX_ADMIN_KEY": "s3cr3t-value"}
    parts = (DataFolder(tmp_path), base(tmp_path), Addresses("127.0.0.1", 1, 2))
    assert "s3cr3t-value" not in repr(build_gateway(options(tmp_path), environ, *parts))


def test_gateway_is_told_of_its_engine_unless_the_user_named_pools(tmp_path: Path) -> None:
    parts = (DataFolder(tmp_path), base(tmp_path), Addresses("127.0.0.1", 1, 8100))
    env = build_gateway(options(tmp_path), {}, *parts).env
    assert env["LORAPLEX_POOLS"] == '{"default": {"base": "tiny", "engines": ["http://127.0.0.1:8100"]}}'
    assert env["LORAPLEX_LISTEN"] == "127.0.0.1:1"
    assert build_gateway(options(tmp_path), {"LORAPLEX_POOLS": "{}"}, *parts).env["LORAPLEX_POOLS"] == "{}"


def test_engine_flags_are_passed_on(tmp_path: Path) -> None:
    flags = ("--dtype", "float32")
    parts = (DataFolder(tmp_path), base(tmp_path), Addresses("127.0.0.1", 1, 2))
    assert build_engine(options(tmp_path, engine_flags=flags), {}, *parts).argv[-2:] == flags


def test_what_the_user_set_is_not_overridden() -> None:
    env = build_environment({"LORAPLEX_ENGINE_KEY_FILE": "/mine", "PATH": "/bin", "LORAPLEX_URL": "x"}, "gateway")
    give_default_file(env, "LORAPLEX_ENGINE_KEY", Path("/ours"))
    assert env == {"LORAPLEX_ENGINE_KEY_FILE": "/mine", "PATH": "/bin"}


def test_addresses_beyond_this_machine_need_a_proxy(tmp_path: Path) -> None:
    with pytest.raises(UpError, match="--insecure-behind-proxy"):
        check_binding(options(tmp_path, host="0.0.0.0"))
    check_binding(options(tmp_path, host="0.0.0.0", insecure_behind_proxy=True))
    check_binding(options(tmp_path, host="::1"))


@pytest.mark.parametrize(
    ("host", "listen", "url"),
    [
        ("127.0.0.1", "127.0.0.1:80", "http://127.0.0.1:80"),
        ("::1", "[::1]:80", "http://[::1]:80"),
        ("0.0.0.0", "0.0.0.0:80", "http://127.0.0.1:80"),
    ],
)
def test_addresses_are_written_as_urls_want_them(host: str, listen: str, url: str) -> None:
    addresses = Addresses(host, 80, 8100)
    assert (addresses.listen, addresses.url) == (listen, url)


def child_of(tmp_path: Path, program: str, ends: list[tuple[str, int, float]]) -> Child:
    argv = (sys.executable, "-c", textwrap.dedent(program))
    return Child(ChildSpec("part", argv, dict(os.environ), tmp_path / "part.log"), lambda *end: ends.append(end))


async def wait_for(condition: object, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.02)


async def test_child_that_ends_starts_again(tmp_path: Path) -> None:
    ends: list[tuple[str, int, float]] = []
    child = child_of(tmp_path, "print('hello', flush=True); raise SystemExit(3)", ends)
    await child.start()
    child.keep()
    await wait_for(lambda: len(ends) == 2)
    await child.stop(1)
    assert ends == [("part", 3, 1.0), ("part", 3, 2.0)]
    assert child.read_tail().splitlines() == ["hello", "hello"]


async def test_child_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "_FIRST_S", 0.05)
    ends: list[tuple[str, int, float]] = []
    program = tmp_path / "program"
    spec = ChildSpec("part", (str(program),), dict(os.environ), tmp_path / "part.log")
    child = Child(spec, lambda *end: ends.append(end))
    write_program(program)
    await child.start()
    await wait_for(lambda: child.exit_code is not None)
    program.unlink()
    child.keep()
    await wait_for(lambda: len(ends) >= 2)
    write_program(program)
    await wait_for(lambda: ends[-1][1] == 3 and len(ends) > 2)
    await child.stop(1)
    assert [code for _, code, _ in ends[:2]] == [3, 127]
    assert "part cannot be started" in child.read_tail()


def write_program(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_text("#!/bin/sh\nexit 3\n")
    new.chmod(0o700)
    new.rename(path)


async def test_log_of_an_earlier_run_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "part.log").write_text("old trouble\n")
    child = child_of(tmp_path, "print('new', flush=True)", [])
    await child.start()
    await wait_for(lambda: child.exit_code is not None)
    assert child.read_tail() == "new"


async def test_child_that_drains_is_waited_for(tmp_path: Path) -> None:
    program = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(0)))
        print("up", flush=True)
        time.sleep(60)
    """
    child = child_of(tmp_path, program, [])
    await child.start()
    await wait_for(lambda: child.read_tail() == "up")
    await child.stop(10)
    assert child.exit_code == 0


async def test_child_that_will_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    program = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
        time.sleep(60)
    """
    child = child_of(tmp_path, program, [])
    await child.start()
    await wait_for(lambda: child.read_tail() != "")
    grandchild = int(child.read_tail())
    await child.stop(0.2)
    assert child.exit_code == -signal.SIGKILL
    await wait_for(lambda: not is_running(grandchild))


def test_child_dies_with_its_supervisor(tmp_path: Path) -> None:
    program = f"""
        import asyncio, os
        from pathlib import Path
        from loraplex.supervisor.child import Child, ChildSpec
        async def main():
            argv = ({sys.executable!r}, "-c", "import time; time.sleep(60)")
            child = Child(ChildSpec("part", argv, dict(os.environ), Path({str(tmp_path / "log")!r})), print)
            await child.start()
            print(child._process.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert is_running(pid)
        supervisor.kill()
    asyncio.run(wait_for(lambda: not is_running(pid)))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
