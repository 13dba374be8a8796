"""`loraplex up` on a tiny base, its data, its objects and its cache each on a small disk, and what can hurt it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from chaos_base import ADMIN_KEY, NUM_STILL, World
from chaos_fault import Fault, errors
from chaos_faults import full
from core_world import share_native
from loraplex.supervisor.watch import SILENCE_S
from loraplex_engine.bases.folder import load_spec
from platforms import list_children
from server_process import ServerProcess, send_signal, wait_gone
from support import free_port

FLAGS = ("--dtype", "float32", "--cpu-threads", "1", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "256")
_SLOTS = ("--max-loras", "2", "--max-cpu-loras", "2")
_STOP_S = 60.0


class MachineWorld(World):
    """One platform, started with its supervisor."""

    def __init__(self, folder: Path, disks: dict[str, Path], flags: tuple[str, ...] = _SLOTS) -> None:
        data = disks.get("data", folder) / "data"
        super().__init__(folder, f"sqlite+aiosqlite:///{data}/loraplex.db")
        self.tools = dict(disks)
        port = free_port()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
        environ = kept | {
            "LORAPLEX_ADMIN_KEY": ADMIN_KEY,
            "LORAPLEX_PARITY_GATE": "off",
            "LORAPLEX_SIGNING_KEY_FILE": str(folder / "signing.pem"),
            "LORAPLEX_OBJECT_STORE_URL": f"file://{disks.get('objects', folder)}/objects",
            "LORAPLEX_CACHE_DIR": share_native(folder / "cache"),
            "LORAPLEX_DRAIN_S": "5",
        }
        argv = ["-m", "loraplex", "up", "--port", str(port), "--data-dir", str(data), "--base", str(self.base)]
        self.platform = ServerProcess(
            [sys.executable, *argv, *FLAGS, *flags], environ, folder / "up.log", port, "/readyz"
        )
        self.gateways = [self.platform]

    async def start(self, num_still: int = NUM_STILL) -> None:
        """Start it and make what clients use."""
        await asyncio.to_thread(self.platform.start)
        await self.reference.start()
        self.clients.urls = [self.platform.url]
        await self.clients.prepare(msgspec.to_builtins(load_spec(self.base)), num_still)
        await self.wait_whole()

    async def stop(self) -> None:
        """End it as an operator does."""
        await self.reference.stop()
        code = await asyncio.to_thread(self.platform.end, _STOP_S)
        assert code == 0, self.platform.log[-3000:]

    def children(self) -> list[int]:
        """The processes that the supervisor watches: gateway and engine front."""
        return self.platform.find("loraplex gateway") + self.platform.find("loraplex_engine serve")


@asynccontextmanager
async def killed(world: MachineWorld) -> AsyncIterator[None]:
    """`kill -9` of the supervisor, and `up` once more when its children are gone."""
    below = list_children(world.platform.pid)
    await asyncio.to_thread(world.platform.kill)
    await asyncio.to_thread(wait_gone, below)
    yield
    await asyncio.to_thread(world.platform.start)


@asynccontextmanager
async def restarted(world: MachineWorld) -> AsyncIterator[None]:
    """SIGTERM, and `up` once more."""
    assert await asyncio.to_thread(world.platform.end, _STOP_S) == 0
    yield
    await asyncio.to_thread(world.platform.start)


@asynccontextmanager
async def frozen(world: MachineWorld) -> AsyncIterator[None]:
    """SIGSTOP of the supervisor for a while."""
    send_signal(signal.SIGSTOP, [world.platform.pid])
    yield
    send_signal(signal.SIGCONT, [world.platform.pid])


@asynccontextmanager
async def children_killed(world: MachineWorld) -> AsyncIterator[None]:
    """`kill -9` of gateway and engine front."""
    send_signal(signal.SIGKILL, world.children())
    yield


@asynccontextmanager
async def children_frozen(world: MachineWorld) -> AsyncIterator[None]:
    """SIGSTOP of gateway and engine front, whose supervisor must find out."""
    send_signal(signal.SIGSTOP, world.children())
    yield


_AWAY = errors("no_replica", "replica_failed", "adapter_loading", "unavailable")
_FULL = errors("unavailable", "store_unavailable", "internal_error")
MACHINE = [
    Fault(
        "up, supervisor: kill -9",
        "all its children end with it; what was acknowledged is there when it is started again",
        killed,
        held_s=1,
        ends=_AWAY,
        is_cut=True,
    ),
    Fault("up, supervisor: SIGSTOP for 4 s", "its children serve on; none is restarted meanwhile", frozen, held_s=4),
    Fault(
        "up: SIGTERM and start",
        "running answers end, then everything ends with exit code 0",
        restarted,
        held_s=0.5,
        ends=_AWAY | errors("draining"),
        act_ends=errors("no_replica"),
        is_cut=True,
    ),
    Fault(
        "up, gateway and engine front: kill -9",
        "the supervisor starts both again, after a second",
        children_killed,
        held_s=0,
        ends=_AWAY,
        is_cut=True,
    ),
    Fault(
        "up, gateway and engine front: SIGSTOP",
        f"the supervisor finds both silent for {SILENCE_S:g} s, ends them and starts them again",
        children_frozen,
        held_s=SILENCE_S + 15,
        ends=_AWAY,
        is_cut=True,
        longest_s=SILENCE_S + 15,
    ),
    Fault(
        "up: disk of database and logs full",
        "requests and changes are refused, none is half done; all go on when there is room",
        full("data"),
        held_s=4,
        ends=_FULL,
        act_ends=_FULL,
        needs="data",
    ),
    Fault(
        "up: disk of the adapter store full",
        "uploads are refused and leave nothing; everything else goes on",
        full("objects"),
        held_s=4,
        act_ends=_FULL,
        needs="objects",
    ),
]
