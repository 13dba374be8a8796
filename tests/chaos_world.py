"""A fleet that can be hurt everywhere: two gateways, a registry, two engines; Postgres, Redis and S3 behind proxies.

All are real processes on a tiny base; engines have fewer slots than there are adapters, so that loads go on all the
time. `ChaosWorld` starts and ends them; faults reach for what they hurt by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from chaos_base import ADMIN_KEY, NUM_STILL, World
from chaos_reference import engine_argv, engine_environ
from databases import EmbeddedPostgres
from loraplex_engine.bases.folder import load_spec
from redis_world import RedisServer
from s3_world import S3Server
from server_process import ServerProcess
from support import free_port
from tcp_proxy import NONE, TcpProxy

ENGINE_KEY = "the-engine-key-of-the-chaos"
STUCK_S = 8.0
"""After so long an engine's core, and its loader, count as stuck (60 by default)."""
_ENGINE_FLAGS = ("--max-loras", "2", "--max-cpu-loras", "2", "--max-model-len", "256", "--step-timeout", f"{STUCK_S:g}")


class ChaosWorld(World):
    """All processes of the fleet, and its clients."""

    def __init__(self, folder: Path, postgres: EmbeddedPostgres, redis: RedisServer, s3: S3Server) -> None:
        super().__init__(folder, postgres.url.replace("postgresql://", "postgresql+psycopg://"))
        self.postgres, self.redis, self.s3 = postgres, redis, s3
        self.proxies = {
            name: TcpProxy(urlsplit(url).port or 0)
            for name, url in (("postgres", postgres.url), ("redis", redis.url), ("s3", s3.endpoint))
        }
        self.engines: list[ServerProcess] = []
        self.wanted_metrics = ("loraplex_limits_degraded 0.0", "loraplex_redis_up 1.0")

    async def start(self, tools: dict[str, Any]) -> None:
        """Start everything and make what clients use; a disk called `cache` is for the first engine's."""
        self.tools = tools
        for proxy in self.proxies.values():
            await proxy.start()
        self._build()
        # the first one to come makes the database's first rows
        first, *others = self.processes
        first.launch()
        await asyncio.to_thread(first.wait_alive)
        for process in others:
            process.launch()
        await self.reference.start()
        for process in others:
            await asyncio.to_thread(process.wait_alive)
        self.clients.urls = [gateway.url for gateway in self.gateways]
        await self.clients.prepare(msgspec.to_builtins(load_spec(self.base)), NUM_STILL)
        await self.wait_whole()

    async def stop(self) -> None:
        """End it, without grace."""
        await self.reference.stop()
        for process in self.processes:
            process.kill()
        for proxy in self.proxies.values():
            await proxy.stop()

    @property
    def processes(self) -> list[ServerProcess]:
        """All but the databases, in the order in which they start."""
        return [*self.gateways, *([self.registry] if self.gateways else []), *self.engines]

    def _build(self) -> None:
        ports = [free_port() for _ in range(5)]
        registry_url = f"http://127.0.0.1:{ports[2]}"
        engine_urls = [f"http://127.0.0.1:{port}" for port in ports[3:]]
        shared = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        shared |= self.s3.environ | {
            "LORAPLEX_DATABASE_URL": _through(self.database_url, self.proxies["postgres"]),
            "LORAPLEX_OBJECT_STORE_URL": self.s3.url().replace(self.s3.endpoint, _at(self.proxies["s3"])),
            "LORAPLEX_ENGINE_KEY": ENGINE_KEY,
            "LORAPLEX_PARITY_GATE": "off",
        }
        gateway = {
            "LORAPLEX_REDIS_URL": _through(self.redis.url, self.proxies["redis"]),
            "LORAPLEX_POOLS": json.dumps({"main": {"base": self.base.name, "engines": engine_urls}}),
            "LORAPLEX_ADMIN_KEY": ADMIN_KEY,
            "LORAPLEX_KEY_PEPPER": "a-pepper-that-gateways-share",
            "LORAPLEX_SIGNING_KEY_FILE": str(self.folder / "signing.pem"),
            "LORAPLEX_DRAIN_S": "5",
        }
        first = self.tools["clock"].environ if "clock" in self.tools else {}
        self.gateways = [
            self._server(f"gateway-{index}", ["-m", "loraplex", "gateway"], shared | gateway | own, port, "/readyz")
            for index, (port, own) in enumerate(zip(ports[:2], (first, {}), strict=True))
        ]
        verify = {"LORAPLEX_VERIFY_KEYS": self.signer.public_pem.decode()}
        self.registry = self._server("registry", ["-m", "loraplex_registry"], shared | verify, ports[2], "/healthz")
        self.engines = [
            ServerProcess(
                engine_argv(self.base, port, *_ENGINE_FLAGS),
                engine_environ(
                    self.signer,
                    (self.tools.get("cache", self.folder) if index == 0 else self.folder) / f"cache-{index}",
                    LORAPLEX_REGISTRY_URL=registry_url,
                    LORAPLEX_ENGINE_KEY=ENGINE_KEY,
                    LORAPLEX_DRAIN_S="5",
                ),
                self.folder / f"engine-{index}.log",
                port,
                "/healthz",
            )
            for index, port in enumerate(ports[3:])
        ]

    def _server(self, name: str, argv: list[str], environ: dict[str, str], port: int, path: str) -> ServerProcess:
        (self.folder / name).mkdir()
        own = {"LORAPLEX_DATA_DIR": str(self.folder / name), "LORAPLEX_LISTEN": f"127.0.0.1:{port}"}
        return ServerProcess([sys.executable, *argv], environ | own, self.folder / f"{name}.log", port, path)


@contextlib.asynccontextmanager
async def suffering(proxy: TcpProxy, fault: Any) -> AsyncIterator[None]:
    """Let a proxy's server be hurt while the block runs."""
    await proxy.suffer(fault)
    try:
        yield
    finally:
        await proxy.suffer(NONE)


def _at(proxy: TcpProxy) -> str:
    return f"http://127.0.0.1:{proxy.port}"


def _through(url: str, proxy: TcpProxy) -> str:
    """The same URL by way of the proxy."""
    return url.replace(f":{urlsplit(url).port}/", f":{proxy.port}/")
