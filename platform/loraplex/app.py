"""The composition root of the gateway process: settings in, one ASGI application and its background work out.

Gateway and registry are one application behind one door. Everything is made here and passed on; no part finds another
by itself. `serve` runs the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
import uvloop
from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp

from loraplex.db.claim import Claim
from loraplex.db.database import Database
from loraplex.db.revision import check_revision
from loraplex.errors import LoraplexError, SettingsError, StartError, UnavailableError
from loraplex.fleet.fleet import Fleet
from loraplex.fleet.pools import parse_pools
from loraplex.gateway.authentication import Authenticator
from loraplex.gateway.directory import Directory
from loraplex.gateway.door import Door
from loraplex.gateway.drain import Drain
from loraplex.gateway.edge import Edge
from loraplex.gateway.forgetting import Forgetting
from loraplex.gateway.inference import Inference
from loraplex.gateway.metrics import GatewayMetrics
from loraplex.gateway.names import NameIndex
from loraplex.gateway.problem import describe
from loraplex.gateway.quarantine import QuarantineWatch
from loraplex.gateway.recovery import DoneFinder
from loraplex.gateway.routes.elsewhere import build_elsewhere_router
from loraplex.gateway.routes.inference import build_inference_router
from loraplex.gateway.routes.keys import build_key_router
from loraplex.gateway.routes.models import build_model_router
from loraplex.gateway.routes.probes import build_probe_router
from loraplex.gateway.routes.reports import build_report_router
from loraplex.gateway.routes.tenants import build_tenant_router
from loraplex.gateway.server import GatewayServer, bind, describe_address
from loraplex.keys.files import load_admin_key, load_pepper, load_signer
from loraplex.keys.service import KeyService
from loraplex.settings import Settings, check_exposure
from loraplex.tenants.service import TenantService
from loraplex.usage.ledger import Ledger
from loraplex.usage.recovery import find_open_requests, settle_open_requests
from loraplex_registry.app import Registry, RegistryError, RegistrySettings, create_registry
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.ids import new_public_id

_MANAGEMENT_BODY_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Gateway:
    """All parts of one gateway process, wired together; `start` before the first request, `stop` after the last."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings = settings
        self._registry = registry
        self._tasks: list[asyncio.Task[None]] = []
        self.database = Database(settings.database_url)
        self.claim = Claim(settings.database_url)
        self._pepper = load_pepper(settings.key_pepper, settings.data_dir)
        self.keys = KeyService(self.database, self._pepper)
        self.tenants = TenantService(self.database)
        self.directory = Directory(self.database)
        registry.know_tenants(
            lambda name: self.directory.find_tenant(name) is not None,
            lambda tenant_id: self.directory.get_tenant(uuid.UUID(tenant_id)).state != "deleted",
        )
        self.names = NameIndex(registry.names_delta, lambda: registry.epoch.current, self.directory.find_tenant_id)
        self.ledger = Ledger(self.database)
        self.metrics = GatewayMetrics()
        self.drain = Drain()
        self.signer = load_signer(settings.signing_key, settings.data_dir)
        self.fleet = Fleet(parse_pools(settings.pools), self._sign_as_platform, self.names.find_fingerprint)
        self.fleet.on_view = QuarantineWatch(self.names, self._quarantine_failed, self.metrics).act
        self._forgetting = Forgetting(self.names, self.fleet)
        registry.know_engines(self.fleet.forget_failure, self._forgetting.forget)
        self.app = self._build_app()

    async def start(self) -> None:
        """Check the schema, load names and keys, find engines, settle what an earlier process left open.

        Raises:
            StartError: A setting is wrong, or the database is at another revision or another gateway's.
            LoraplexError: The database does not answer.
        """
        await check_revision(self.database)
        await self.claim.take()
        await self._ensure_admin_key()
        await self.directory.refresh()
        await self._registry.start()
        await self.names.ensure_fresh()
        self.ledger.start()
        await self.fleet.start()
        found = await find_open_requests(self.database, datetime.now(UTC))
        recovery = settle_open_requests(self.ledger, found, DoneFinder(self.fleet).find)
        self._tasks = [asyncio.create_task(recovery), asyncio.create_task(self._keep_names_fresh())]

    async def stop(self) -> None:
        """Write what is pending and close everything; fine after a start that failed half-way."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._forgetting.stop()
        await self.fleet.stop()
        await self.ledger.stop()
        await self._registry.stop()
        await self.claim.release()
        await self.database.close()

    async def _ensure_admin_key(self) -> None:
        text, is_new = load_admin_key(self._settings.admin_key, self._settings.data_dir)
        await self.keys.ensure_bootstrap_key(text)
        if is_new:
            _log.info("made the admin key: %s", self._settings.data_dir and self._settings.data_dir / "admin.key")

    async def _keep_names_fresh(self) -> None:
        """Learn of bases and adapters without a request, so that engines are judged by the bases of now."""
        while True:
            await asyncio.sleep(1.0)
            try:
                await self.names.ensure_fresh()
            except Exception as error:  # noqa: BLE001 - the next request tries again and tells its client
                _log.warning("names could not be read: %r", error)

    async def _quarantine_failed(self, digest: str, message: str) -> int:
        try:
            return await self._registry.quarantine_failed(digest, message, _build_platform_identity())
        except RegistryError as error:
            raise UnavailableError(error.message) from error

    def _sign_as_platform(self) -> str:
        return self.signer.sign(_build_platform_identity(), "engine")

    def _build_app(self) -> ASGIApp:
        authenticator = Authenticator(self.directory, self._pepper)
        inference = Inference(
            self.directory, self.names, self.fleet, self.ledger, self.signer, self.metrics, self.drain
        )
        app = Litestar(
            route_handlers=[
                build_inference_router(inference),
                build_model_router(self.names, inference, int(time.time())),
                build_elsewhere_router(),
                build_tenant_router(self.database, self.tenants, self.directory, self.names, self._registry),
                build_key_router(self.database, self.keys, self.directory),
                build_report_router(self.database, self.directory, self.fleet),
                build_probe_router(
                    self.names, self.drain, self.fleet, self.metrics, authenticator, self._check_database
                ),
                self._registry.router(),
            ],
            middleware=[Door(authenticator, self.directory, self._settings.engine_key)],
            exception_handlers={HTTPException: self._answer_error, Exception: self._answer_error},
            request_max_body_size=_MANAGEMENT_BODY_BYTES,
            openapi_config=None,
            logging_config=None,
        )
        return Edge(app, self.metrics)

    async def _check_database(self) -> None:
        await check_revision(self.database)

    def _answer_error(self, request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:  # noqa: ARG002
        problem = describe(error)
        return Response(
            msgspec.json.encode(problem.body),
            status_code=problem.status,
            headers=problem.all_headers,
            media_type="application/json",
        )


def _build_platform_identity() -> Identity:
    return Identity(
        role="admin",
        tenant_id=None,
        tenant=None,
        scopes=(),
        key_id="gateway",
        actor="gateway",
        request_id=new_public_id("req"),
    )


def _create_registry(settings: Settings) -> Registry:
    try:
        return create_registry(
            RegistrySettings(
                database_url=settings.database_url,
                object_store_url=settings.object_store_url,
                engine_key=settings.engine_key,
                parity_gate=settings.parity_gate,
            )
        )
    except RegistryError as error:
        raise SettingsError(error.message) from error


@asynccontextmanager
async def running_gateway(settings: Settings) -> AsyncIterator[Gateway]:
    """Yield a started gateway and stop it at the end."""
    gateway = Gateway(settings, _create_registry(settings))
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.stop()


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        StartError: The gateway cannot start; the message says what to do.
    """
    check_exposure(settings)
    try:
        listening = bind(settings.host, settings.port)
    except OSError as error:
        raise SettingsError(f"LORAPLEX_LISTEN: {settings.host}:{settings.port}: {error.strerror}") from error
    with listening:
        async with running_gateway(settings) as gateway:
            _log.info("listening on %s", describe_address(listening))
            server = GatewayServer(gateway.app, gateway.drain, settings.drain_s)
            watch = asyncio.create_task(gateway.claim.watch(server.stop))
            await server.serve(sockets=[listening])
            watch.cancel()


def run(settings: Settings) -> int:
    """Run the gateway process and return its exit code: 0 after a signal, 2 for a bad setting, 3 for the database."""
    _configure_log(settings.log_level)
    try:
        uvloop.run(serve(settings))
    except StartError as error:
        _log.error("%s", error.message)
        return error.exit_code
    except LoraplexError as error:
        _log.error("%s", error.message)
        return 1
    return 0


def _configure_log(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # It logs every call to an engine at info.
    logging.getLogger("httpx").setLevel(logging.WARNING)
