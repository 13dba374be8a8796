"""The core as a process: start, words, death, restart. The core here is scripted; process and sockets are real."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import scripted_core_process
from loraplex_engine.config import CoreLaunch, EngineConfig
from loraplex_engine.errors import StartupError
from loraplex_engine.server import core_process
from loraplex_engine.server.core_client import CoreClient
from loraplex_engine.server.core_process import CoreProcess
from loraplex_engine.wire.messages import (
    AddRequest,
    DropAdapter,
    GetState,
    LoadAdapter,
    SamplingParams,
    ToCore,
    TokenEvent,
    encode,
)
from scripted_core import build_facts, until
from toy_tokenizers import write_byte_level

SCRIPT = Path(scripted_core_process.__file__)
COMMAND = [sys.executable, str(SCRIPT)]


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parent))
    monkeypatch.setenv("LORAPLEX_ENGINE_KEY", "secret-of-the-environment")


def build_core(folder: Path, client: CoreClient, behaviour: str = "", **settings: float) -> CoreProcess:
    config = EngineConfig(base=str(write_byte_level(folder / "base")), cache_dir="", served_model_name=behaviour)

    def build_launch(to_core: str, to_front: str) -> CoreLaunch:
        return CoreLaunch(config=config, to_core=to_core, to_front=to_front, engine_key="secret")

    return CoreProcess(COMMAND, build_launch, client, **settings)


@asynccontextmanager
async def running(core: CoreProcess, client: CoreClient) -> AsyncIterator[None]:
    task = asyncio.create_task(core.run())
    try:
        await until(lambda: client.is_ready)
        yield
    finally:
        await core.stop()
        await task


def folder_modes(parent: Path) -> list[int]:
    return [folder.stat().st_mode & 0o777 for folder in parent.glob("lpx-*")]


async def finish_of(
    client: CoreClient, request_id: str, on_token: asyncio.Event | None = None, digest: str | None = None
) -> TokenEvent:
    last: asyncio.Future[TokenEvent] = asyncio.get_running_loop().create_future()

    def sink(event: TokenEvent) -> None:
        if event.finish is not None:
            last.set_result(event)
        elif on_token is not None:
            on_token.set()

    params = SamplingParams(max_tokens=20)
    client.add(AddRequest(request_id=request_id, prompt_ids=[5], params=params, digest=digest), sink)
    return await last


async def test_a_killed_core_fails_its_requests_and_comes_back(tmp_path: Path) -> None:
    client = CoreClient()
    core = build_core(tmp_path, client)
    async with running(core, client):
        first, begun = core.pid, asyncio.Event()
        assert first is not None
        request = asyncio.create_task(finish_of(client, "a", begun))
        await begun.wait()
        os.kill(first, signal.SIGKILL)
        lost = await request
        assert (lost.finish, lost.error and lost.error.code) == ("error", "replica_failed")
        assert client.num_open == 0
        await until(lambda: client.is_ready)
        assert core.pid != first
        assert core.num_restarts == 1
        assert (await finish_of(client, "b")).finish == "stop"


async def test_a_start_is_logged_before_the_core_can_keeps_secrets_and_leaves_no_folder_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    client = CoreClient()
    with caplog.at_level("INFO"):
        async with running(build_core(tmp_path, client), client):
            told = [record.getMessage() for record in caplog.records]
            modes = folder_modes(tmp_path)
            state = await client.call(GetState, 5)
    assert told[0] == "starting the core"
    assert told[-1].startswith("serving ")
    # secrets are in neither arguments nor environment
    assert isinstance(state, dict)
    assert state["key"] == "secret"
    assert state["argv"] == COMMAND[1:]
    assert "LORAPLEX_ENGINE_KEY" not in state["environment"]
    # the sockets' folder goes with the core
    assert modes == [0o700]
    assert folder_modes(tmp_path) == []


async def test_a_core_that_falls_silent_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = CoreClient()
    core = build_core(tmp_path, client, "hangs", step_timeout_s=0.5, tick_s=0.05)
    async with running(core, client):
        first = core.pid
        lost = await finish_of(client, "stuck-0")
        assert lost.error is not None
        assert lost.error.code == "replica_failed"
        assert core.num_stuck == 1
        assert "open requests: stuck-0 (base)" in caplog.text
        await until(lambda: client.is_ready and core.pid != first)


async def test_a_core_that_compiles_may_be_silent_for_longer(tmp_path: Path) -> None:
    client = CoreClient()
    core = build_core(tmp_path, client, "compiles", step_timeout_s=0.2, tick_s=0.02)
    async with running(core, client):
        assert (await finish_of(client, "a")).finish == "stop"
        assert core.num_stuck == 0


async def test_a_new_core_is_asked_for_the_adapters_of_the_last_one(tmp_path: Path) -> None:
    kept, used, dropped = ("sha256:" + digit * 64 for digit in "123")
    client = CoreClient()
    core = build_core(tmp_path, client)
    async with running(core, client):
        await client.call(LoadAdapter, 5, digest=dropped)
        await client.call(LoadAdapter, 5, digest=kept, pin=True)
        await client.call(DropAdapter, 5, digest=dropped)
        assert (await finish_of(client, "a", digest=used)).finish == "stop"
        for _ in range(2):
            pid = core.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: client.is_ready and core.pid != pid)
            state = await client.call(GetState, 5)
            assert isinstance(state, dict)
            loads = [(call["digest"], call["pin"]) for call in state["calls"] if call["type"] == "load"]
            assert loads == [(kept, True), (used, False)]


@pytest.mark.parametrize(("behaviour", "words"), [("fails", "lower --max-model-len"), ("exits", "code 7")])
async def test_a_core_that_cannot_start_says_why(tmp_path: Path, behaviour: str, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        await build_core(tmp_path, CoreClient(), behaviour).run()


async def test_a_core_that_speaks_nonsense_is_replaced(tmp_path: Path) -> None:
    def refuse(_: bytes) -> None:
        raise ValueError("nonsense")

    client = CoreClient()
    core = build_core(tmp_path, client)
    async with running(core, client):
        first = core.pid
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core_process.messages, "decode_to_front", refuse)
            lost = await finish_of(client, "a")
        assert lost.error is not None
        await until(lambda: client.is_ready)
        assert core.pid != first


def test_a_request_that_cannot_be_sent_leaves_nothing_open() -> None:
    client = CoreClient()

    def send(message: ToCore) -> None:
        encode(message)

    client.attach(send)
    client.receive(build_facts())
    with pytest.raises(OverflowError):
        client.add(
            AddRequest(request_id="a", prompt_ids=[5], params=SamplingParams(max_tokens=2**70)), lambda event: None
        )
    assert client.num_open == 0
