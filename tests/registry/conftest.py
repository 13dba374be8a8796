"""A registry app on each database dialect, with a base registered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from loraplex_registry.adapters.integrity import check_integrity
from loraplex_registry.app import create_app
from loraplex_registry.settings import RegistrySettings, ServerSettings
from loraplex_registry.storage.folder import FolderStore
from loraplex_registry.storage.memory import MemoryStore
from loraplex_registry.storage.s3 import S3Store
from loraplex_registry.storage.s3_address import parse_address
from loraplex_registry.storage.store import Store
from loraplex_registry.uploads.checker import Checker
from loraplex_registry.wire.identity import TokenSigner, generate_signing_key
from registry_world import BASE, ENGINE_KEY, ThreadChecker, World, build_tiny_spec
from support import tiny_llama_config, write_adapter, write_base


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base on disk, for shapes."""
    return write_base(tmp_path_factory.mktemp("registry-bases") / BASE, tiny_llama_config())


@pytest.fixture
def make_adapter(base_folder: Path, tmp_path: Path) -> Any:
    """Write an adapter; other seeds are other content."""

    def make(seed: int = 0, **changes: Any) -> Path:
        return write_adapter(
            tmp_path / f"adapter-{seed}-{len(list(tmp_path.iterdir()))}", base_folder, seed=seed, **changes
        )

    return make


@pytest.fixture(params=["memory", "folder", pytest.param("s3", marks=pytest.mark.enable_socket)])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Each kind of object store, empty; they keep the same promises."""
    if request.param == "folder":
        yield FolderStore(tmp_path / "objects")
        return
    if request.param == "s3":
        s3 = S3Store(parse_address(request.getfixturevalue("s3_url")), tmp_path / "scratch")
        yield s3
        s3.close()
        return
    memory = MemoryStore()
    yield memory
    memory.close()


@pytest.fixture
def registry_settings(database_url: str, tmp_path: Path) -> RegistrySettings:
    """Settings of the app; tests replace single ones by overriding this fixture."""
    return RegistrySettings(
        database_url=database_url, object_store_url=f"file://{tmp_path}/objects", engine_key=ENGINE_KEY
    )


@pytest.fixture
def checker() -> Checker:
    """What judges uploads; tests of the process that does it really override this."""
    return ThreadChecker()


@pytest.fixture
async def empty_world(registry_settings: RegistrySettings, checker: Checker, tmp_path: Path) -> AsyncIterator[World]:
    """The running app without bases."""
    signer = TokenSigner(generate_signing_key())
    app = create_app(
        ServerSettings(registry=registry_settings, host="127.0.0.1", port=0, verify_keys=(signer.public_pem,)),
        checker=checker,
    )
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    # The app's own lifespan must end in the task that began it, which fixtures cannot promise.
    await app.state.registry.start()
    async with httpx.AsyncClient(transport=transport, base_url="http://registry") as http:
        yield World(http, app.state.registry, signer, tmp_path / "objects")
    async with app.state.registry.services.database.read() as session:
        await check_integrity(session)
    await app.state.registry.stop()


@pytest.fixture
async def world(empty_world: World) -> World:
    """The running app with the tiny base."""
    admin = empty_world.caller(None, role="admin")
    answer = await admin("POST", "/api/v1/bases", content=msgspec.json.encode(build_tiny_spec()))
    assert answer.status_code == 201, answer.text
    return empty_world
