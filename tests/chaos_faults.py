"""The faults of processes, databases, store and disks of a fleet; those of clients are in `chaos_client_faults`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from chaos_books import CUT
from chaos_fault import COLD, Fault, errors
from chaos_world import STUCK_S, ChaosWorld, suffering
from server_process import ServerProcess, send_signal
from tcp_proxy import Fault as Way

Act = Callable[[ChaosWorld], AbstractAsyncContextManager[None]]
_UNAVAILABLE = errors("unavailable")
_BROKEN = errors("replica_failed")
_END_S = 30.0


def killed(find: Callable[[ChaosWorld], ServerProcess]) -> Act:
    """`kill -9`, and started again."""

    @asynccontextmanager
    async def act(world: ChaosWorld) -> AsyncIterator[None]:
        await asyncio.to_thread(find(world).kill)
        yield
        await asyncio.to_thread(find(world).start)

    return act


def restarted(find: Callable[[ChaosWorld], ServerProcess]) -> Act:
    """SIGTERM, its end with 0, and started again."""

    @asynccontextmanager
    async def act(world: ChaosWorld) -> AsyncIterator[None]:
        assert await asyncio.to_thread(find(world).end, _END_S) == 0
        yield
        await asyncio.to_thread(find(world).start)

    return act


def frozen(find: Callable[[ChaosWorld], ServerProcess]) -> Act:
    """SIGSTOP of the process alone, then SIGCONT."""

    @asynccontextmanager
    async def act(world: ChaosWorld) -> AsyncIterator[None]:
        send_signal(signal.SIGSTOP, [find(world).pid])
        yield
        send_signal(signal.SIGCONT, [find(world).pid])

    return act


def signalled(number: signal.Signals, find: Callable[[ChaosWorld], list[int]]) -> Act:
    """A signal to what others have started, who must find out and start it anew."""

    @asynccontextmanager
    async def act(world: ChaosWorld) -> AsyncIterator[None]:
        pids = find(world)
        assert pids, "there is none"
        send_signal(number, pids)
        yield

    return act


def on_way(name: str, way: Way) -> Act:
    """Something is wrong with the way to a server."""
    return lambda world: suffering(world.proxies[name], way)


def switched(stop: Callable[[ChaosWorld], Any], start: Callable[[ChaosWorld], Any]) -> Act:
    """Two calls that block."""

    @asynccontextmanager
    async def act(world: ChaosWorld) -> AsyncIterator[None]:
        await asyncio.to_thread(stop, world)
        yield
        await asyncio.to_thread(start, world)

    return act


def cut_again_and_again(name: str) -> Act:
    """Break every connection to a server five times a second."""

    @asynccontextmanager
    async def act(world: ChaosWorld) -> AsyncIterator[None]:
        async def cut() -> None:
            while True:
                world.proxies[name].cut()
                await asyncio.sleep(0.2)

        async with _beside(cut()):
            yield

    return act


def full(disk: str) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """Fill a disk to its last byte."""

    @asynccontextmanager
    async def act(world: Any) -> AsyncIterator[None]:
        ballast = world.tools[disk] / "ballast"
        await asyncio.to_thread(fill, ballast)
        yield
        ballast.unlink()

    return act


def stepped(seconds: int) -> Act:
    """The first gateway's clock goes wrong by so much, then right again."""

    @asynccontextmanager
    async def act(world: ChaosWorld) -> AsyncIterator[None]:
        world.tools["clock"].step(seconds)
        yield
        world.tools["clock"].step(0)

    return act


def fill(ballast: Path) -> None:
    """Write until nothing fits any more."""
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _gateway(world: ChaosWorld) -> ServerProcess:
    return world.gateways[0]


def _registry(world: ChaosWorld) -> ServerProcess:
    return world.registry


def _engine(world: ChaosWorld) -> ServerProcess:
    return world.engines[0]


def _core(world: ChaosWorld) -> list[int]:
    return world.engines[0].find("loraplex_engine core")


def _loader(world: ChaosWorld) -> list[int]:
    return world.engines[0].find("loraplex_engine.lora.worker")


def _sandbox(world: ChaosWorld) -> list[int]:
    return world.engines[0].find("server.sandbox.process")


def _checks(world: ChaosWorld) -> list[int]:
    return world.gateways[0].find("uploads.check_process")


PROCESSES = [
    Fault(
        "gateway: kill -9",
        "the other gateway serves all, and settles what this one left open",
        killed(_gateway),
        ends=errors("no_replica"),
        act_ends=errors(CUT),
        is_cut=True,
    ),
    Fault(
        "gateway: SIGSTOP for 8 s",
        "the other one serves all; requests at this one wait and end when it goes on; nothing is settled twice",
        frozen(_gateway),
        held_s=8,
        ends=_BROKEN,
        is_cut=True,
    ),
    Fault(
        "gateway: SIGTERM and start",
        "running answers end, new connections are refused",
        restarted(_gateway),
        held_s=0.5,
        ends=errors("no_replica", "draining"),
        act_ends=errors(CUT),
        is_cut=True,
    ),
    Fault(
        "registry: kill -9",
        "what engines hold is served; cold adapters wait or are told adapter_loading",
        killed(_registry),
        ends=COLD,
    ),
    Fault("registry: SIGSTOP for 4 s", "as above", frozen(_registry), held_s=4, ends=COLD),
    Fault("registry: SIGTERM and start", "as above", restarted(_registry), held_s=0.5, ends=COLD),
    Fault(
        "engine front: kill -9",
        "its core, loader and sandbox end with it; requests go to the other engine, streams that ran are told",
        killed(_engine),
        ends=_BROKEN,
        is_sample=True,
    ),
    Fault(
        "engine front: SIGSTOP for 40 s",
        "found by its silence: requests without a byte go to the other engine after 15 s, streams end after 30 s",
        frozen(_engine),
        held_s=40,
        ends=_BROKEN,
        longest_s=40,
    ),
    Fault(
        "engine: SIGTERM and start",
        "no request fails: running ones end, new ones go to the other engine",
        restarted(_engine),
        held_s=0.5,
    ),
    Fault(
        "engine core: kill -9",
        "the front starts another; streams that ran are told, others go to the other engine",
        signalled(signal.SIGKILL, _core),
        held_s=0,
        ends=_BROKEN,
    ),
    Fault(
        "engine core: SIGSTOP",
        f"found by its silence, after --step-timeout (here {STUCK_S:g} s), and replaced",
        signalled(signal.SIGSTOP, _core),
        held_s=STUCK_S + 3,
        ends=_BROKEN,
        longest_s=30,
    ),
    Fault(
        "engine loader: kill -9",
        "the core starts another; loads that ran are told adapter_loading",
        signalled(signal.SIGKILL, _loader),
        held_s=0,
        ends=COLD,
    ),
    Fault(
        "engine loader: SIGSTOP",
        f"found by its silence, after --step-timeout (here {STUCK_S:g} s), and replaced",
        signalled(signal.SIGSTOP, _loader),
        held_s=STUCK_S + 3,
        ends=COLD,
        longest_s=30,
    ),
    Fault("engine sandbox: kill -9", "the next task starts another", signalled(signal.SIGKILL, _sandbox), held_s=0),
    Fault("upload checks: kill -9", "the next upload starts another", signalled(signal.SIGKILL, _checks), held_s=0),
    Fault(
        "upload checks: SIGSTOP",
        "found after 10 s by the upload that waits, which then is checked by another",
        signalled(signal.SIGSTOP, _checks),
        held_s=0,
    ),
]
DATABASES = [
    Fault(
        "Postgres: kill -9",
        "requests are refused, none is dispatched without its row; running answers go on",
        switched(lambda world: world.postgres.kill(), lambda world: world.postgres.start()),
        ends=_UNAVAILABLE | COLD,
        act_ends=_UNAVAILABLE,
        is_sample=True,
    ),
    Fault(
        "Postgres: no connection",
        "as above",
        on_way("postgres", Way(is_gone=True)),
        ends=_UNAVAILABLE | COLD,
        act_ends=_UNAVAILABLE,
    ),
    Fault(
        "Postgres: silent for 8 s",
        "refused within the time limits of pool and statements",
        on_way("postgres", Way(is_silent=True)),
        held_s=8,
        ends=_UNAVAILABLE | COLD,
        act_ends=_UNAVAILABLE,
    ),
    Fault(
        "Postgres: 100 ms late each way",
        "slow, and nothing else",
        on_way("postgres", Way(delay_s=0.1)),
        held_s=4,
        ends=_UNAVAILABLE | COLD,
        act_ends=_UNAVAILABLE,
    ),
    Fault(
        "Postgres: connections cut, 5 times a second",
        "each act is done once or not at all",
        cut_again_and_again("postgres"),
        held_s=3,
        ends=_UNAVAILABLE | COLD,
        act_ends=_UNAVAILABLE,
    ),
    Fault(
        "Redis: kill -9",
        "no request fails; each gateway counts by itself and looks for changes in SQL",
        switched(lambda world: world.redis.kill(), lambda world: world.redis.start()),
    ),
    Fault(
        "Redis: SIGSTOP for 3 s", "as above", switched(lambda w: w.redis.freeze(), lambda w: w.redis.thaw()), held_s=3
    ),
    Fault("Redis: 200 ms late each way", "as above", on_way("redis", Way(delay_s=0.2)), held_s=3),
    Fault("Redis: connections cut, 5 times a second", "as above", cut_again_and_again("redis"), held_s=3),
]

_STORE = errors("store_unavailable")
CLOCK = [
    Fault(
        "clock of a gateway: 10 min ahead",
        "engines refuse what it signs, and nobody else is concerned; no running request is taken for an old one",
        stepped(600),
        held_s=4,
        ends=_BROKEN | errors("no_replica"),
        needs="clock",
    ),
    Fault(
        "clock of a gateway: 10 min behind",
        "as above",
        stepped(-600),
        held_s=4,
        ends=_BROKEN | errors("no_replica"),
        needs="clock",
    ),
]
STORE = [
    Fault(
        "S3: kill -9",
        "what engines hold or have on disk is served; uploads are refused; cold adapters are told adapter_loading",
        switched(lambda world: world.s3.kill(), lambda world: world.s3.start()),
        ends=COLD,
        act_ends=_STORE,
    ),
    Fault("S3: no connection", "as above", on_way("s3", Way(is_gone=True)), ends=COLD, act_ends=_STORE, is_sample=True),
    Fault(
        "S3: silent for 8 s",
        "as above; an upload that waits goes on",
        on_way("s3", Way(is_silent=True)),
        held_s=8,
        ends=COLD,
        act_ends=_STORE,
        longest_s=60,
    ),
    Fault(
        "S3: 150 ms late each way",
        "slow, and nothing else",
        on_way("s3", Way(delay_s=0.15)),
        held_s=4,
        ends=COLD,
        act_ends=_STORE,
    ),
    Fault(
        "S3: broken after 4 KB of each connection",
        "no adapter with bytes missing is served",
        on_way("s3", Way(reset_after=4_000)),
        held_s=4,
        ends=COLD,
        act_ends=_STORE,
    ),
    Fault(
        "S3: ended after 4 KB as if that were all",
        "as above",
        on_way("s3", Way(end_after=4_000)),
        held_s=4,
        ends=COLD,
        act_ends=_STORE,
    ),
    Fault(
        "engine: disk of its adapter cache full",
        "what it holds is served; others go to the other engine, or are told that the disk is full",
        full("cache"),
        held_s=4,
        ends=COLD,
        needs="cache",
    ),
]
