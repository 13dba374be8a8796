"""The composition root of the gateway process: settings in, one ASGI application and its background work out.

Gateway and registry are one application behind one door. Everything is made here and passed on; no part finds another
by itself. `serve` runs the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import uvloop
from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp

from loraplex.dashboard.application import Fork, build_dashboard
from loraplex.dashboard.parts import Parts
from loraplex.db.claim import Claim
from loraplex.db.database import Database
from loraplex.db.epoch import read_epoch
from loraplex.db.epoch_bus import Epochs, RedisBus, name_database
from loraplex.db.events import record_event
from loraplex.db.revision import check_revision
from loraplex.errors import LoraplexError, SettingsError, StartError, UnavailableError
from loraplex.escalations.service import EscalationService
from loraplex.escalations.watch import EscalationWatch
from loraplex.fleet.desired import BrokenAlias
from loraplex.fleet.fleet import Fleet
from loraplex.fleet.judge import FleetJudge
from loraplex.fleet.pools import parse_pools
from loraplex.fleet.reconciler import FleetEvent, Reconciler
from loraplex.fleet.view import FleetView
from loraplex.gateway.advising import Advising
from loraplex.gateway.authentication import Authenticator, build_platform_identity
from loraplex.gateway.desired_state import DesiredState
from loraplex.gateway.directory import Directory
from loraplex.gateway.door import Door
from loraplex.gateway.drain import Drain
from loraplex.gateway.edge import build_edge
from loraplex.gateway.epoch_watch import EpochWatch
from loraplex.gateway.forgetting import Forgetting
from loraplex.gateway.full_pools import FullPools, is_registered
from loraplex.gateway.inference import Inference
from loraplex.gateway.limiting import RecountingLedger, build_limiter
from loraplex.gateway.log import configure_log
from loraplex.gateway.metrics import GatewayMetrics
from loraplex.gateway.names import NameIndex
from loraplex.gateway.problem import describe
from loraplex.gateway.quarantine import QuarantineWatch
from loraplex.gateway.recent import remember_traffic
from loraplex.gateway.recovery import DoneFinder
from loraplex.gateway.routes.capacity import build_capacity_router
from loraplex.gateway.routes.elsewhere import build_elsewhere_router
from loraplex.gateway.routes.escalations import build_escalation_routers
from loraplex.gateway.routes.fleet import build_fleet_router
from loraplex.gateway.routes.inference import build_inference_router
from loraplex.gateway.routes.keys import build_key_router
from loraplex.gateway.routes.models import build_model_router
from loraplex.gateway.routes.probes import build_probe_router
from loraplex.gateway.routes.reports import build_report_router
from loraplex.gateway.routes.stats import build_stats_router
from loraplex.gateway.routes.tenants import build_tenant_router
from loraplex.gateway.routes.usage import build_usage_router
from loraplex.gateway.routes.versions import build_version_router
from loraplex.gateway.sampling import sample_engines
from loraplex.gateway.scrape import Scrape
from loraplex.gateway.server import GatewayServer, bind, describe_address
from loraplex.gateway.tries import Tries
from loraplex.keys.files import load_admin_key, load_pepper, load_signer
from loraplex.keys.last_use import LastUse
from loraplex.keys.service import KeyService
from loraplex.openapi.document import build_document
from loraplex.openapi.route import build_openapi_router
from loraplex.quotas.redis_meter import RedisMeter
from loraplex.settings import Settings, check_exposure
from loraplex.stats.recorder import StatsRecorder
from loraplex.tenants.service import TenantService
from loraplex.usage.dead_gateways import DeadGateways
from loraplex.usage.ledger import Ledger
from loraplex.usage.outcomes import keep_outcomes_short
from loraplex.usage.recovery import find_open_requests, settle_open_requests
from loraplex_registry.app import MESSAGES, Registry, RegistryError, RegistrySettings, TenantRef, create_registry
from loraplex_registry.wire.ending import end_tasks
from loraplex_registry.wire.ids import new_public_id
from loraplex_registry.wire.open_files import allow_open_files
from loraplex_registry.wire.reload import Reloader, reload_on_hangup

_MANAGEMENT_BODY_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Gateway:
    """All parts of one gateway process, wired together; `start` before the first request, `stop` after the last."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings = settings
        self._registry = registry
        self._tasks: list[asyncio.Task[None]] = []
        self.database = Database(settings.database_url, settings.database_pool_size)
        self.id = new_public_id("gw")
        self.claim = Claim(settings.database_url, self.id, is_shared=settings.has_company)
        self._pepper = load_pepper(settings.key_pepper, settings.data_dir)
        self.keys = KeyService(self.database, self._pepper)
        self.last_use = LastUse(self.database)
        self.tenants = TenantService(self.database)
        self.directory = Directory(self.database)
        registry.know_tenants(
            lambda name: self.directory.find_tenant(name) is not None,
            lambda tenant_id: self.directory.get_tenant(uuid.UUID(tenant_id)).state != "deleted",
        )
        self.names = NameIndex(registry.names_delta, lambda: registry.epoch.current, self.directory.find_tenant_id)
        self.ledger = Ledger(self.database, self.id)
        self.metrics, self.tries = GatewayMetrics(), Tries()
        self.limiter = build_limiter(self.database, self.directory, self.metrics.limits_degraded.set, self.id)
        self.drain = Drain()
        self.signer = load_signer(settings.signing_key, settings.data_dir)
        self.fleet = Fleet(
            parse_pools(settings.pools), self._sign_as_platform, self.names.find_fingerprint, self.names.has_served
        )
        self.fleet.find_registered = self.names.find_registered
        self.escalations = EscalationService(self.database, registry, FullPools(self.fleet))
        self._escalation_watch = EscalationWatch(self.escalations, self.names.ensure_fresh, self._has_what_it_names)
        self._escalation_watch.on_look = self.metrics.show_escalations
        self.stats = StatsRecorder(self.database, self.id)
        self._quarantine = QuarantineWatch(self.names, self._quarantine_failed, self.metrics)
        self.fleet.on_view = self._act_on_view
        self.fleet.on_placed = self.metrics.count_placement
        self._forgetting = Forgetting(self.names, self.fleet, settings.warm_s)
        self._desired = DesiredState(lambda: self.fleet.pools, self.names, self._find_broken_aliases)
        self.reconciler = Reconciler(
            self.fleet,
            self._desired.read,
            self._mend_alias,
            self._record_fleet_event,
            self._may_repair,
            settings.warm_s,
        )
        self.reconciler.on_repair, self.reconciler.on_look = self.metrics.count_repair, self.metrics.show_differences
        registry.know_engines(self.fleet.forget_failure, self._forgetting.forget)
        registry.know_parity(FleetJudge(self.fleet), self.metrics.count_parity)
        registry.know_uploads(self.metrics.count_admitted, self.metrics.count_refused)
        self.advising = Advising(self.database, self.fleet, self.names, self.directory, settings.outcome_days)
        self.epochs = EpochWatch(self._read_epochs, self._take_epochs, self.metrics.redis_up.set)
        self.database.publish_epoch = lambda epoch: self.epochs.publish(gateway=epoch)
        registry.know_gateways(lambda epoch: self.epochs.publish(registry=epoch))
        self.app = self._build_app()

    async def start(self) -> None:
        """Check the schema, load names and keys, find engines, settle what an earlier process left open.

        Raises:
            StartError: A setting is wrong, or the database is at another revision or another gateway's.
            LoraplexError: The database does not answer.
        """
        await check_revision(self.database)
        await self.claim.take()
        shared = None
        if self._settings.has_company:
            assert self._settings.redis_url is not None, "it has company by that"
            name = await name_database(self.database)
            await self.epochs.start(RedisBus(self._settings.redis_url, name))
            shared = RedisMeter(self._settings.redis_url, name)
            self.tries.share(self._settings.redis_url, name)
        elif self._settings.redis_url is not None:
            _log.warning("LORAPLEX_REDIS_URL is not used: with SQLite there is one gateway, which counts by itself")
        await self.limiter.start(shared)
        await self._ensure_admin_key()
        await self.directory.refresh()
        await self._registry.start()
        await self.names.ensure_fresh()
        self.ledger.start()
        await remember_traffic(self.database, self.names, self.fleet.traffic)
        await self.fleet.start()
        recovery = await self._recover()
        sweep = keep_outcomes_short(self.database, self._settings.outcome_days)
        works = (recovery, self._keep_names_fresh(), sweep, self.epochs.run(), self.reconciler.run())
        watches = (self.last_use.run(), self._escalation_watch.run(), self.stats.run())
        self._tasks = [asyncio.create_task(work) for work in (*works, *watches)]

    async def stop(self) -> None:
        """Write what is pending and close everything; fine after a start that failed half-way."""
        await end_tasks(self._tasks)
        await self.last_use.flush()
        await self._forgetting.stop()
        await self._registry.stop_judging()
        await self.fleet.stop()
        await self.ledger.stop()
        await self.stats.stop()
        await self.limiter.stop()
        await self.tries.close()
        await self._registry.stop()
        await self.epochs.close()
        await self.claim.release()
        await self.database.close()

    async def _recover(self) -> Coroutine[None, None, None]:
        """Return the work that settles what gateways left open that are gone: all others, if this one is alone."""
        find_done = DoneFinder(self.fleet).find
        ledger = RecountingLedger(self.ledger, self.limiter, self.directory)
        if self._settings.has_company:
            return DeadGateways(self.database, ledger, self.id, self.claim.hold_dead, find_done).run()
        found = await find_open_requests(self.database, datetime.now(UTC))
        return settle_open_requests(ledger, found, find_done)

    async def _read_epochs(self) -> Epochs:
        try:
            return Epochs(await self._registry.refresh_epoch(), await read_epoch(self.database))
        except RegistryError as error:
            raise UnavailableError(error.message) from error

    def _take_epochs(self, epochs: Epochs) -> None:
        self._registry.epoch.advance(epochs.registry)
        self.directory.note_epoch(epochs.gateway)

    async def _freshen_keys(self) -> None:
        await self.epochs.catch_up()
        await self.directory.ensure_fresh()

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
                await self.directory.ensure_fresh()
                await self.names.ensure_fresh()
            except Exception as error:  # noqa: BLE001 - the next request tries again and tells its client
                _log.warning("names could not be read: %r", error)

    async def _act_on_view(self, view: FleetView) -> None:
        sample_engines(view, self.stats)
        await self._quarantine.act(view)

    def _has_what_it_names(self, escalation: dict[str, Any]) -> bool:
        return is_registered(self.names, escalation["adapter_id"], escalation["full_version"])

    async def _quarantine_failed(self, digest: str, message: str) -> int:
        try:
            return await self._registry.quarantine_failed(digest, message, build_platform_identity())
        except RegistryError as error:
            raise UnavailableError(error.message) from error

    async def _find_broken_aliases(self) -> list[BrokenAlias]:
        try:
            found = await self._registry.find_broken_aliases()
        except RegistryError as error:
            raise UnavailableError(error.message) from error
        return [
            BrokenAlias(
                tenant_id=one.tenant.id,
                tenant=one.tenant.name,
                adapter=one.adapter,
                alias=one.alias,
                targets=f"it leads to {', '.join(f'{target.version} ({target.weight} %)' for target in one.targets)}",
            )
            for one in found
        ]

    async def _mend_alias(self, broken: BrokenAlias) -> str:
        tenant = TenantRef(broken.tenant_id, broken.tenant)
        try:
            mended = await self._registry.mend_alias(tenant, broken.adapter, broken.alias, build_platform_identity())
        except RegistryError as error:
            raise UnavailableError(error.message) from error
        self._desired.look_again()
        if mended is None:
            return "it is deleted: it never led to a version that is there"
        return f"it leads to {', '.join(f'{target.version} ({target.weight} %)' for target in mended.targets)}"

    async def _record_fleet_event(self, event: FleetEvent) -> None:
        async with self.database.write() as connection:
            await record_event(
                connection,
                build_platform_identity(),
                event.action,
                event.subject,
                tenant_id=event.tenant_id,
                tenant=event.tenant,
                details=event.details,
            )

    async def _may_repair(self) -> bool:
        return await self.claim.try_lead("reconciler")

    def _sign_as_platform(self) -> str:
        return self.signer.sign(build_platform_identity(), "engine")

    def _build_app(self) -> ASGIApp:
        authenticator = Authenticator(self.directory, self._pepper, self.last_use.note)
        inference = Inference(
            self.directory,
            self.names,
            self.fleet,
            self.ledger,
            self.signer,
            self.metrics,
            self.drain,
            self.limiter,
            self.stats,
        )
        app = Litestar(
            route_handlers=[
                build_inference_router(inference),
                build_model_router(self.names, inference, int(time.time())),
                build_elsewhere_router(),
                build_tenant_router(self.database, self.tenants, self.directory, self.names, self._registry),
                build_key_router(self.database, self.keys, self.directory),
                build_report_router(self.database, self.directory, self.fleet),
                build_usage_router(self.database, self.directory, self.fleet),
                build_fleet_router(self.fleet, self.reconciler),
                build_stats_router(self.database, self.directory, self.stats),
                build_capacity_router(self.advising, self.directory),
                *build_escalation_routers(self.escalations, self.directory),
                build_version_router(self.database, self.names, self.fleet),
                build_probe_router(
                    self.names,
                    self.drain,
                    self._check_database,
                    Scrape(self.metrics, self.fleet, self.names, authenticator, self._freshen_keys),
                ),
                build_openapi_router(build_document(MESSAGES)),
                self._registry.router(),
            ],
            middleware=[
                Door(authenticator, self.directory, self._settings.engine_key, self._freshen_keys, self.tries.bearers)
            ],
            exception_handlers={HTTPException: self._answer_error, Exception: self._answer_error},
            request_max_body_size=_MANAGEMENT_BODY_BYTES,
            openapi_config=None,
            logging_config=None,
        )
        fork = Fork(app, build_dashboard(self._list_parts(authenticator, inference)))
        return build_edge(fork, self.metrics, self._settings.trusted_proxies)

    def _list_parts(self, authenticator: Authenticator, inference: Inference) -> Parts:
        return Parts(
            database=self.database,
            directory=self.directory,
            authenticator=authenticator,
            freshen_keys=self._freshen_keys,
            names=self.names,
            fleet=self.fleet,
            reconciler=self.reconciler,
            limiter=self.limiter,
            stats=self.stats,
            tenants=self.tenants,
            escalations=self.escalations,
            inference=inference,
            drain=self.drain,
            registry=self._registry,
            adapters=self._registry.console,
            advising=self.advising,
            logins=self.tries.logins,
        )

    async def _check_database(self) -> None:
        await check_revision(self.database)

    def _answer_error(self, request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:  # noqa: ARG002
        problem = describe(error)
        return Response(
            problem.encode(),
            status_code=problem.status,
            headers=problem.all_headers,
            media_type="application/json",
        )


def _create_registry(settings: Settings) -> Registry:
    try:
        return create_registry(
            RegistrySettings(
                database_url=settings.database_url,
                object_store_url=settings.object_store_url,
                object_store_public_url=settings.object_store_public_url,
                scratch_dir=settings.data_dir and settings.data_dir / "scratch",
                engine_key=settings.engine_key,
                parity_gate=settings.parity_gate,
                database_pool_size=settings.database_pool_size,
                purge_after_days=settings.purge_after_days,
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
            reload_on_hangup(Reloader("gateway", os.environ, {"LORAPLEX_POOLS": gateway.fleet.take_pools}))
            watch = asyncio.create_task(gateway.claim.watch(server.stop))
            await server.serve(sockets=[listening])
            watch.cancel()


def run(settings: Settings) -> int:
    """Run the gateway process and return its exit code: 0 after a signal, 2 for a bad setting, 3 for the database."""
    configure_log(settings.log_level, settings.log_format)
    allow_open_files()
    try:
        uvloop.run(serve(settings))
    except StartError as error:
        _log.error("%s", error.message)
        return error.exit_code
    except LoraplexError as error:
        _log.error("%s", error.message)
        return 1
    return 0
