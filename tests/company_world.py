"""Gateways beside one another: one Postgres, one Redis, one scripted engine, and all else of each its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from app_server import running_app
from gateway_world import ADMIN_KEY, BASE, GatewayWorld, register_base, started_gateway
from loraplex.settings import Settings
from loraplex_registry.http.protocol import BoundedProtocol
from scripted_engine import ScriptedEngine, running_engine


@asynccontextmanager
async def running_company(
    database_url: str, redis_url: str, folder: Path, num_gateways: int = 2
) -> AsyncIterator[list[GatewayWorld]]:
    """Yield gateways that share all but their memory."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running_engine())
        worlds = [
            await stack.enter_async_context(_running_member(database_url, redis_url, folder, engine))
            for _ in range(num_gateways)
        ]
        await register_base(worlds[0])
        for world in worlds[1:]:
            await world.gateway.epochs.catch_up()
            await world.gateway.names.ensure_fresh()
            await world.gateway.fleet.poll()
        yield worlds


@asynccontextmanager
async def _running_member(
    database_url: str, redis_url: str, folder: Path, engine: ScriptedEngine
) -> AsyncIterator[GatewayWorld]:
    settings = Settings(
        database_url=database_url,
        object_store_url=f"file://{folder}/objects",
        data_dir=folder,
        pools=f'{{"main": {{"base": "{BASE}", "engines": ["{engine.url}"]}}}}',
        admin_key=ADMIN_KEY,
        engine_key="the-engine-key",
        redis_url=redis_url,
        drain_s=1,
    )
    async with started_gateway(settings) as gateway, running_app(gateway.app, http=BoundedProtocol) as url:
        world = GatewayWorld(gateway, url, [engine], folder)
        yield world
        await world.http.aclose()
