"""A gateway in this process and real engine processes on a tiny base, which can be ended, killed and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from app_server import running_app
from core_world import share_native
from gateway_world import ADMIN_KEY, GatewayWorld
from loraplex.app import running_gateway
from loraplex.settings import Settings
from loraplex_engine.bases.folder import load_spec
from loraplex_engine.bases.pull import pull
from loraplex_registry.http.protocol import BoundedProtocol
from support import free_port, tiny_llama_config, write_adapter, write_base

_ENGINE_KEY = "the-engine-key"
_START_S = 120.0
BASE = "tiny"


class EngineProcess:
    """One engine on a port of its own, the same in all its lives."""

    def __init__(self, argv: Sequence[str], environ: dict[str, str], log: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._argv = [*argv, "--listen", f"127.0.0.1:{port}"]
        self._environ = environ
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What it has said in all its lives."""
        return self._log.read_text(errors="replace")

    def start(self) -> None:
        """Start it; it serves a while later."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._argv, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    async def end(self, limit_s: float = 60.0) -> int:
        """SIGTERM, as an orchestrator does; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(self.process.wait, limit_s)
        self.process = None
        return code

    def kill(self) -> None:
        """`kill -9` of the front and all that it has started, as if the machine were gone."""
        if self.process is None:
            return
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self.process = None


class FleetWorld(GatewayWorld):
    """A gateway whose `processes` are its engines, and the adapters of one tenant."""

    def __init__(self, gateway: Any, url: str, folder: Path, base: Path, processes: list[EngineProcess]) -> None:
        super().__init__(gateway, url, [], folder)
        self.base = base
        self.processes = processes
        self.digests: dict[str, str] = {}
        self.begun: Counter[str] = Counter()
        """Answers that clients are reading, by replica; who reads them counts them."""

    @property
    def num_serving(self) -> int:
        """Engines that get traffic."""
        return sum(replica.problem is None for replica in self.gateway.fleet.view.replicas)

    async def wait_serving(self, count: int) -> None:
        """Wait until so many engines get traffic."""
        async with asyncio.timeout(_START_S):
            while self.num_serving < count:
                for process in self.processes:
                    assert process.process is None or process.process.poll() is None, process.log
                await asyncio.sleep(0.1)

    async def add_adapters(self, tenant: str, count: int, **recipe: Any) -> None:
        """Upload so many adapters of one tenant, `a0`, `a1` and so on; `recipe` as for `write_adapter`."""
        await self.create_tenant(tenant)
        for index in range(count):
            source = self.folder / "adapters" / f"a{index}"
            write_adapter(source, self.base, **{"rank": 4, "seed": index, **recipe})
            files = [("files", (path.name, path.read_bytes())) for path in sorted(source.iterdir())]
            path = f"/api/v1/tenants/{tenant}/adapters/a{index}/versions"
            response = await self.call("POST", path, files=files)
            assert response.status_code == 201, response.text
            self.digests[f"{tenant}/a{index}"] = response.json()["digest"]

    async def state(self, process: EngineProcess) -> dict[str, Any]:
        """What an engine says of itself now."""
        return await self.gateway.fleet.client(process.url).state()


@asynccontextmanager
async def running_fleet(
    database_url: str,
    folder: Path,
    num_engines: int,
    *flags: str,
    base: Path | None = None,
    pins: Sequence[Any] = (),
    **changes: Any,
) -> AsyncIterator[FleetWorld]:
    """Yield a gateway and its engines, all of which serve.

    `flags` are the engines', `base` is a folder as of Hugging Face, `pins` are the pool's, `changes` settings of the
    gateway.
    """
    pulled = pull(str(base or write_base(folder / BASE, tiny_llama_config())), folder / "bases")
    ports = [free_port() for _ in range(num_engines)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    spec = load_spec(pulled)
    fields: dict[str, Any] = {
        "database_url": database_url,
        "object_store_url": f"file://{folder}/objects",
        "data_dir": folder,
        "pools": msgspec.json.encode({"main": {"base": spec.name, "engines": urls, "pin": list(pins)}}).decode(),
        "admin_key": ADMIN_KEY,
        "engine_key": _ENGINE_KEY,
        "parity_gate": "off",
        "drain_s": 1,
    }
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running_gateway(Settings(**fields | changes)))
        url = await stack.enter_async_context(running_app(gateway.app, http=BoundedProtocol))
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")},
            **{name: os.environ[name] for name in ("LORAPLEX_NATIVE",) if name in os.environ},
            "LORAPLEX_VERIFY_KEYS": gateway.signer.public_pem.decode(),
            "LORAPLEX_ENGINE_KEY": _ENGINE_KEY,
            "LORAPLEX_REGISTRY_URL": url,
        }
        argv = [sys.executable, "-m", "loraplex_engine", "serve", "--base", str(pulled), "--dtype", "float32", *flags]
        processes = [
            EngineProcess(
                argv,
                environ | {"LORAPLEX_CACHE_DIR": share_native(folder / f"cache-{port}")},
                folder / f"engine-{port}.log",
                port,
            )
            for port in ports
        ]
        world = FleetWorld(gateway, url, folder, pulled, processes)
        stack.push_async_callback(world.http.aclose)
        for process in processes:
            stack.callback(process.kill)
            process.start()
        response = await world.call("POST", "/api/v1/bases", json=msgspec.to_builtins(spec))
        assert response.status_code in (200, 201), response.text
        await world.wait_serving(num_engines)
        yield world
