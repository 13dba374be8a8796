"""Each probe calls a route that the real program answers to a kubelet, which has no key."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from chart_world import Rendering
from gateway_world import enclosed_world
from loraplex_registry.app import create_app
from loraplex_registry.settings import RegistrySettings, ServerSettings
from loraplex_registry.wire.identity import TokenSigner, generate_signing_key
from scripted_core import running_rig
from toy_tokenizers import write_byte_level

Get = Callable[[str], Awaitable[int]]
HEADERS = {"authorization": "", "user-agent": "kube-probe/1.37", "connection": "close"}


@contextlib.asynccontextmanager
async def running_gateway(folder: Path, database: Path) -> AsyncIterator[Get]:
    async with enclosed_world(f"sqlite+aiosqlite:///{database}", folder) as world:

        async def get(path: str) -> int:
            return (await world.call("GET", path, key=None, headers=HEADERS)).status_code

        yield get


@contextlib.asynccontextmanager
async def running_registry(folder: Path, database: Path) -> AsyncIterator[Get]:
    verify = TokenSigner(generate_signing_key()).public_pem
    registry = RegistrySettings(
        database_url=f"sqlite+aiosqlite:///{database}", object_store_url=f"file://{folder}/objects"
    )
    settings = ServerSettings(registry=registry, host="127.0.0.1", port=0, verify_keys=(verify,))
    transport = httpx.ASGITransport(create_app(settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://registry", headers=HEADERS) as client:

        async def get(path: str) -> int:
            return (await client.get(path)).status_code

        yield get


@contextlib.asynccontextmanager
async def running_engine(folder: Path, _: Path) -> AsyncIterator[Get]:
    async with running_rig(folder, write_byte_level(folder / "base")) as rig:

        async def get(path: str) -> int:
            return (await rig.http.get(path, headers=HEADERS)).status_code

        yield get


PARTS = {"gateway": running_gateway, "registry": running_registry, "engine": running_engine, "trial": running_gateway}


@pytest.mark.parametrize("component", PARTS)
async def test_probes_are_answered(
    render: Callable[[str], Rendering], sqlite_template: Path, tmp_path: Path, component: str
) -> None:
    pods = render("trial" if component == "trial" else "everything").pods_of(component)
    paths = {
        pod.main[f"{kind}Probe"]["httpGet"]["path"] for pod in pods for kind in ("startup", "readiness", "liveness")
    }
    assert paths
    database = Path(shutil.copy(sqlite_template, tmp_path / "loraplex.db"))
    async with PARTS[component](tmp_path, database) as get:
        assert {path: await get(path) for path in paths} == dict.fromkeys(paths, 200)
        assert await get("/nothing") != 200


def test_every_long_lived_container_is_probed_at_its_own_port(rendering: Rendering) -> None:
    for pod in rendering.pods:
        if pod.owner["kind"] not in ("Deployment", "StatefulSet"):
            continue
        named = {port["name"] for port in pod.main["ports"]}
        for kind in ("startup", "readiness", "liveness"):
            assert pod.main[f"{kind}Probe"]["httpGet"]["port"] in named
        # who is slow to serve is not killed for it
        assert pod.main["livenessProbe"]["httpGet"]["path"] == "/healthz"
        if pod.component != "registry":
            assert pod.main["readinessProbe"]["httpGet"]["path"] == "/readyz"


async def test_an_engine_without_a_model_is_alive_and_not_ready(tmp_path: Path) -> None:
    async with running_rig(tmp_path, write_byte_level(tmp_path / "base")) as rig:
        await rig.kill_core()
        found = [(await rig.http.get(path, headers=HEADERS)).status_code for path in ("/readyz", "/healthz")]
        assert found == [503, 200]
