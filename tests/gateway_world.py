"""A whole gateway over real HTTP for tests: real registry, real database, scripted engines, keys and adapters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import sqlalchemy as sa
from litestar.types import ASGIApp, Receive, Scope, Send

from app_server import running_app
from loraplex.app import Gateway, running_gateway
from loraplex.dashboard.application import build_dashboard
from loraplex.dashboard.parts import Parts
from loraplex.db.tables import request, usage
from loraplex.settings import Settings
from loraplex_registry.http.protocol import BoundedProtocol
from scripted_engine import FINGERPRINT, ScriptedEngine, running_engine
from support import linear_shapes, tiny_llama_config, write_adapter, write_base

ADMIN_KEY = "an-admin-key-for-tests"
BASE = "tiny"


class GatewayWorld:
    """Everything that a test of the gateway touches."""

    def __init__(self, gateway: Gateway, url: str, engines: list[ScriptedEngine], folder: Path) -> None:
        self.gateway = gateway
        self.url = url
        self.engines = engines
        self.folder = folder
        self.http = httpx.AsyncClient(base_url=url, timeout=30, trust_env=False)
        self._num_adapters = 0

    @property
    def engine(self) -> ScriptedEngine:
        """The first engine."""
        return self.engines[0]

    async def call(self, method: str, path: str, *, key: str | None = ADMIN_KEY, **options: Any) -> httpx.Response:
        """Send one request with a bearer key."""
        headers = {**({"authorization": f"Bearer {key}"} if key else {}), **options.pop("headers", {})}
        return await self.http.request(method, path, headers=headers, **options)

    async def create_tenant(self, name: str, **fields: Any) -> None:
        """Create a tenant."""
        response = await self.call("POST", "/api/v1/tenants", json={"name": name, **fields})
        assert response.status_code == 201, response.text

    async def create_key(self, tenant: str, **fields: Any) -> str:
        """Create a key and return its text."""
        response = await self.call("POST", f"/api/v1/tenants/{tenant}/keys", json={"name": "test", **fields})
        assert response.status_code == 201, response.text
        text: str = response.json()["key"]
        return text

    async def push(self, tenant: str, adapter: str = "default", **params: Any) -> dict[str, Any]:
        """Upload a new random adapter version and return it."""
        self._num_adapters += 1
        source = self.folder / f"adapter-{self._num_adapters}"
        write_adapter(source, self.folder / BASE, rank=2, seed=self._num_adapters)
        files = [("files", (path.name, path.read_bytes())) for path in sorted(source.iterdir())]
        path = f"/api/v1/tenants/{tenant}/adapters/{adapter}/versions"
        response = await self.call("POST", path, files=files, params=params)
        assert response.status_code == 201, response.text
        version: dict[str, Any] = response.json()
        return version

    def last_files(self) -> list[tuple[str, tuple[str, bytes]]]:
        """The multipart files of the adapter that was uploaded last."""
        source = self.folder / f"adapter-{self._num_adapters}"
        return [("files", (path.name, path.read_bytes())) for path in sorted(source.iterdir())]

    async def push_again(self, tenant: str, adapter: str = "default") -> dict[str, Any]:
        """Upload what was uploaded last, under another name."""
        self._num_adapters -= 1
        return await self.push(tenant, adapter)

    async def complete(self, model: str, prompt: str, key: str, **options: Any) -> httpx.Response:
        """Send one completion."""
        fields = {"model": model, "prompt": prompt, **options.pop("fields", {})}
        return await self.call("POST", "/v1/completions", key=key, json=fields, **options)

    @asynccontextmanager
    async def stream(self, model: str, prompt: str, key: str, **fields: Any) -> AsyncIterator[httpx.Response]:
        """Open one streamed completion."""
        body = {"model": model, "prompt": prompt, "stream": True, **fields}
        headers = {"authorization": f"Bearer {key}"}
        async with self.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            yield response

    async def rows(self, table: sa.Table) -> list[dict[str, Any]]:
        """Return all rows of a table."""
        async with self.gateway.database.read() as connection:
            return [dict(row) for row in (await connection.execute(sa.select(table))).mappings()]

    async def usage(self) -> list[dict[str, Any]]:
        """Return all usage rows."""
        return await self.rows(usage)

    async def open_requests(self) -> list[str]:
        """Return the ids of requests that are not settled."""
        return [row["request_id"] for row in await self.rows(request) if row["settled_at"] is None]


def check_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    """Assert the one shape of errors and return the message."""
    body = response.json()
    assert response.status_code == status, response.text
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers["x-request-id"].startswith("req_")
    message: str = body["error"]["message"]
    assert message
    return message


async def until(is_true: Callable[[], bool | Awaitable[bool]], timeout_s: float = 60.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = is_true()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.01)


class _LateDashboard:
    """The dashboard, put together when a test first asks for it: few do, and it is a third of a gateway."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._app = self._app or build_dashboard(self._parts)
        await self._app(scope, receive, send)


@asynccontextmanager
async def started_gateway(settings: Settings) -> AsyncIterator[Gateway]:
    """Yield a started gateway and stop it at the end."""
    async with AsyncExitStack() as stack:
        with patch("loraplex.app.build_dashboard", _LateDashboard):
            gateway = await stack.enter_async_context(running_gateway(settings))
        yield gateway


@asynccontextmanager
async def running_world(
    database_url: str, folder: Path, num_engines: int = 1, known: dict[str, Any] | None = None, **changes: Any
) -> AsyncIterator[GatewayWorld]:
    """Yield a gateway with a registered tiny base and its engines, which remember the requests in `known`.

    `changes` are settings other than those of tests.
    """
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(running_engine()) for _ in range(num_engines)]
        for engine in engines:
            engine.known.update(known or {})
        fields: dict[str, Any] = {
            "database_url": database_url,
            "object_store_url": f"file://{folder}/objects",
            "data_dir": folder,
            "pools": json.dumps({"main": {"base": BASE, "engines": [engine.url for engine in engines]}}),
            "admin_key": ADMIN_KEY,
            "engine_key": "the-engine-key",
            "drain_s": 1,
            "warm_s": 0.0,
        }
        settings = Settings(**fields | changes)
        gateway = await stack.enter_async_context(started_gateway(settings))
        url = await stack.enter_async_context(running_app(gateway.app, http=BoundedProtocol))
        world = GatewayWorld(gateway, url, engines, folder)
        stack.push_async_callback(world.http.aclose)
        await register_base(world)
        yield world


@asynccontextmanager
async def enclosed_world(database_url: str, folder: Path, **changes: Any) -> AsyncIterator[GatewayWorld]:
    """Yield a gateway without engines that is called in this process, without sockets; `changes` as above."""
    settings = Settings(
        database_url=database_url,
        object_store_url=f"file://{folder}/objects",
        data_dir=folder,
        admin_key=ADMIN_KEY,
        engine_key="the-engine-key",
        **changes,
    )
    async with started_gateway(settings) as gateway:
        world = GatewayWorld(gateway, "http://gateway", [], folder)
        await world.http.aclose()
        transport = httpx.ASGITransport(app=gateway.app, raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as world.http:
            await register_base(world)
            yield world


async def register_base(world: GatewayWorld) -> None:
    """Make the tiny base known."""
    config = tiny_llama_config()
    write_base(world.folder / BASE, config)
    body = {
        "name": BASE,
        "fingerprint": FINGERPRINT,
        "modules": {path: list(shape) for path, shape in linear_shapes(config).items()},
        "vocab_size": config["vocab_size"],
    }
    response = await world.call("POST", "/api/v1/bases", json=body)
    assert response.status_code in (200, 201), response.text
    await world.gateway.names.ensure_fresh()
    await world.gateway.fleet.poll()
