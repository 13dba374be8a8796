"""The data folder of a small platform, made by the registry itself in this process: no sockets, no engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from loraplex.backup.source import Source, find_source
from loraplex_registry.app import create_app, upgrade
from loraplex_registry.settings import RegistrySettings, ServerSettings
from loraplex_registry.wire.identity import TokenSigner, generate_signing_key
from registry_world import BASE, ThreadChecker, World, build_tiny_spec, read_folder
from support import tiny_llama_config, write_adapter, write_base

SECRETS = {name: f"secret-text-of-{name}\n" for name in ("admin.key", "key.pepper", "signing.pem", "engine.key")}
ADAPTER = "/api/v1/tenants/{}/adapters/default"


@dataclass
class Silent:
    """Watches a backup and notes its stages."""

    stages: list[str] = field(default_factory=list)
    num_bytes: int = 0

    def begin(self, what: str, total: int | None) -> None:
        self.stages.append(what)

    def advance(self, count: int) -> None:
        self.num_bytes += count


def build_source(data_dir: Path, **settings: str) -> Source:
    """The places of a platform in `data_dir`."""
    return find_source(data_dir, {"cache_dir": str(data_dir.parent / "cache"), **settings})


def make_platform(data_dir: Path) -> Path:
    """A platform at rest: two teams, three versions, a README that differs, an alias, secrets."""
    data_dir.mkdir(mode=0o700, parents=True)
    for name, text in SECRETS.items():
        (data_dir / name).write_text(text)
        (data_dir / name).chmod(0o600)

    async def fill() -> None:
        async with running_registry(data_dir) as world:
            await push(world, "team-a", 1)
            await push(world, "team-a", 2)
            await push(world, "team-b", 1, readme=b"another file beside the same adapter")
            await set_alias(world, "team-a", "canary", {1: 90, 2: 10})

    asyncio.run(fill())
    return data_dir


@asynccontextmanager
async def running_registry(
    data_dir: Path, database_url: str | None = None, object_store_url: str | None = None
) -> AsyncIterator[World]:
    """A registry at work on a data folder, or on what the URLs name, with the tiny base."""
    database_url = database_url or f"sqlite+aiosqlite:///{data_dir}/loraplex.db"
    upgrade(database_url)
    settings = RegistrySettings(
        database_url=database_url,
        object_store_url=object_store_url or f"file://{data_dir}/objects",
        scratch_dir=data_dir / "scratch",
        parity_gate="off",
    )
    signer = TokenSigner(generate_signing_key())
    server = ServerSettings(registry=settings, host="127.0.0.1", port=0, verify_keys=(signer.public_pem,))
    app = create_app(server, checker=ThreadChecker())
    await app.state.registry.start()
    try:
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://registry") as http:
            world = World(http, app.state.registry, signer, data_dir / "objects")
            admin = world.caller(None, role="admin")
            await admin("POST", "/api/v1/bases", content=msgspec.json.encode(build_tiny_spec()))
            yield world
    finally:
        await app.state.registry.stop()


async def push(world: World, tenant: str, seed: int, *, readme: bytes = b"", **params: Any) -> dict[str, Any]:
    """Upload an adapter; equal seeds are equal content."""
    folder = world.store.parent.parent / f"adapter-{seed}"
    if not folder.exists():
        base = world.store.parent.parent / BASE
        write_adapter(folder, base if base.exists() else write_base(base, tiny_llama_config()), seed=seed)
    files = read_folder(folder) | ({"README.md": readme} if readme else {"README.md": b"a file"})
    answer = await world.caller(tenant).upload(ADAPTER.format(tenant), files, params=params)
    assert answer.status_code in (200, 201), answer.text
    version: dict[str, Any] = answer.json()
    return version


async def set_alias(world: World, tenant: str, alias: str, weights: dict[int, int]) -> None:
    """Let an alias lead to versions by weight."""
    targets = [{"version": version, "weight": weight} for version, weight in weights.items()]
    answer = await world.caller(tenant)(
        "PUT", f"{ADAPTER.format(tenant)}/aliases/{alias}", json={"targets": targets}, headers={"If-None-Match": "*"}
    )
    assert answer.status_code in (200, 201), answer.text


def digest_of_tree(folder: Path) -> dict[str, str]:
    """The sha256 of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def find_artifacts(folder: Path) -> Iterator[Path]:
    """The folders of artifacts below an object folder."""
    yield from sorted(folder.glob("sha256/??/??/*"))
