"""The three servers as tests of HTTP see them: an address, a good path, what opens it, and raw bytes in and out."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from byte_client import ByteAnswer, connected
from gateway_world import ADMIN_KEY
from loraplex.app import running_gateway
from loraplex.gateway.drain import Drain
from loraplex.gateway.server import GatewayServer, bind
from loraplex.settings import Settings
from loraplex_registry.__main__ import build_server
from loraplex_registry.app import create_app
from loraplex_registry.settings import RegistrySettings, ServerSettings
from loraplex_registry.wire.identity import Identity, TokenSigner, generate_signing_key
from registry_world import ThreadChecker
from scripted_core import running_rig, sign
from toy_tokenizers import write_byte_level

TENANTS, BASES = "/api/v1/tenants", "/api/v1/bases"


@dataclass
class Part:
    """One server that runs."""

    name: str
    address: str | tuple[str, int]
    server: uvicorn.Server
    read: str
    """A path that GET answers with 200."""
    write: str
    """A path that takes JSON by POST."""
    authorize: Callable[[], str]
    max_body_bytes: int

    def build_head(self, method: str = "GET", path: str | None = None, *lines: str, key: str | None = None) -> bytes:
        """A head that is let in, with more lines."""
        bearer = self.authorize() if key is None else key
        every = [f"{method} {path or self.read} HTTP/1.1", "host: part", f"authorization: Bearer {bearer}", *lines]
        return "\r\n".join([*every, "", ""]).encode("latin-1")

    async def ask(self, data: bytes) -> ByteAnswer:
        """Send bytes and return the first answer."""
        async with connected(self.address) as client, asyncio.timeout(10):
            await client.send(data)
            return await client.read_answer()

    async def ask_all(self, data: bytes, patience_s: float = 10.0) -> tuple[list[ByteAnswer], bool]:
        """Send bytes; return all answers, and whether the server closed the connection after them."""
        answers = []
        async with connected(self.address) as client:
            await client.send(data)
            try:
                async with asyncio.timeout(patience_s):
                    while (answer := await client.read_answer()).status:
                        answers.append(answer)
            except TimeoutError:
                return answers, False
        return answers, True


@asynccontextmanager
async def running_parts(folder: Path, database: Path) -> AsyncIterator[dict[str, Part]]:
    """Gateway, registry and engine (with a scripted core), each by its own composition; `database` is migrated."""
    async with AsyncExitStack() as stack:
        parts = [
            await stack.enter_async_context(_running_gateway(folder / "gateway", database)),
            await stack.enter_async_context(_running_registry(folder / "registry", database)),
            await stack.enter_async_context(_running_engine(folder / "engine")),
        ]
        yield {part.name: part for part in parts}


@asynccontextmanager
async def _running_gateway(folder: Path, database: Path) -> AsyncIterator[Part]:
    settings = Settings(
        database_url=_copy(database, folder),
        object_store_url=f"file://{folder}/objects",
        data_dir=folder,
        admin_key=ADMIN_KEY,
    )
    async with running_gateway(settings) as gateway:
        server = GatewayServer(gateway.app, Drain(), 1)
        async with _serving(server) as address:
            yield Part(
                "gateway",
                address,
                server,
                "/api/v1/tenants",
                "/api/v1/tenants",
                lambda: ADMIN_KEY,
                max_body_bytes=1 << 20,
            )


@asynccontextmanager
async def _running_registry(folder: Path, database: Path) -> AsyncIterator[Part]:
    signer = TokenSigner(generate_signing_key())
    settings = RegistrySettings(database_url=_copy(database, folder), object_store_url=f"file://{folder}/objects")
    app = create_app(
        ServerSettings(registry=settings, host="", port=0, verify_keys=(signer.public_pem,)), checker=ThreadChecker()
    )
    server = build_server(app)
    admin = Identity(role="admin", tenant_id=None, tenant=None, scopes=(), key_id="k", actor="a", request_id="req_test")
    async with _serving(server) as address:
        yield Part(
            "registry",
            address,
            server,
            "/api/v1/bases",
            "/api/v1/bases",
            lambda: signer.sign(admin, "registry"),
            1 << 20,
        )


@asynccontextmanager
async def _running_engine(folder: Path) -> AsyncIterator[Part]:
    folder.mkdir()  # noqa: ASYNC240 - before anything runs
    async with running_rig(folder, write_byte_level(folder / "base")) as rig:
        yield Part(
            "engine", rig.uds, rig.server, "/internal/state", "/v1/tokenize", lambda: sign(role="admin"), 4 << 20
        )


@asynccontextmanager
async def _serving(server: uvicorn.Server) -> AsyncIterator[tuple[str, int]]:
    with bind("127.0.0.1", 0) as listening:
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        yield listening.getsockname()
        server.should_exit = True
        await task


def _copy(database: Path, folder: Path) -> str:
    folder.mkdir()
    return f"sqlite+aiosqlite:///{shutil.copyfile(database, folder / 'loraplex.db')}"
