"""An upload that is still on its way when its tenant is deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway_world import ADMIN_KEY, BASE, GatewayWorld, register_base
from loraplex.app import running_gateway
from loraplex.settings import Settings
from support import tiny_llama_config, write_adapter, write_base


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    settings = Settings(
        database_url=database_url,
        object_store_url=f"file://{tmp_path}/objects",
        data_dir=tmp_path,
        admin_key=ADMIN_KEY,
        engine_key="the-engine-key",
    )
    async with running_gateway(settings) as gateway:
        running = GatewayWorld(gateway, "http://gateway", [], tmp_path)
        await running.http.aclose()
        transport = httpx.ASGITransport(app=gateway.app, raise_app_exceptions=False)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as running.http:
            await register_base(running)
            yield running


async def test_no_adapter_outlives_its_tenant(world: GatewayWorld, tmp_path: Path) -> None:
    await world.create_tenant("team-x")
    source = write_adapter(tmp_path / "adapter", write_base(tmp_path / "again" / BASE, tiny_llama_config()), rank=2)
    files = [("files", (path.name, path.read_bytes())) for path in sorted(source.iterdir())]
    whole = httpx.Request("POST", "http://gateway", files=files)
    body = whole.read()

    async def deleted_half_way() -> AsyncIterator[bytes]:
        yield body[:100]
        assert (await world.call("DELETE", "/api/v1/tenants/team-x?cascade=true")).status_code == 204
        yield body[100:]

    late = await world.call(
        "POST",
        "/api/v1/tenants/team-x/adapters/style/versions",
        content=deleted_half_way(),
        headers={"content-type": whole.headers["content-type"]},
    )
    assert (late.status_code, late.json()["error"]["param"]) == (404, "tenant")
    assert [model["id"] for model in (await world.call("GET", "/v1/models")).json()["data"]] == [BASE]
