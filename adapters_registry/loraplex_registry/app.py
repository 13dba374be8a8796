"""Composition of the registry: as a library inside the gateway's process, or as an app of its own.

`create_registry` is the door for the gateway: its router, its names, its life. Nothing else composes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any

from litestar import Litestar, Request, Router, get
from litestar.datastructures import State
from litestar.di import Provide
from litestar.enums import ScopeType
from litestar.exceptions import HTTPException
from litestar.middleware import DefineMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from loraplex_registry.adapters.base_model import BaseModels
from loraplex_registry.adapters.lifecycle import Lifecycle
from loraplex_registry.adapters.name import read_delta
from loraplex_registry.adapters.retention import Retention
from loraplex_registry.adapters.tenant import TenantRef, find_target
from loraplex_registry.adapters.view import BaseView
from loraplex_registry.aliases import Aliases, BrokenAlias
from loraplex_registry.api.adapters import AdapterRoutes
from loraplex_registry.api.aliases import AliasRoutes
from loraplex_registry.api.bases import BaseRoutes
from loraplex_registry.api.console import Console
from loraplex_registry.api.failure import answer_http_error, answer_mistake, answer_registry_error
from loraplex_registry.api.internal import InternalRoutes
from loraplex_registry.api.message import MESSAGES
from loraplex_registry.api.metric import RegistryMetrics, build_metrics_route
from loraplex_registry.api.service import Services
from loraplex_registry.api.uploads import UploadRoutes
from loraplex_registry.db.database import Database, NamesEpoch
from loraplex_registry.db.migration import Upgrade, check_revision, current, head, knows_revision, serves, upgrade
from loraplex_registry.errors import RegistryError, TokenError
from loraplex_registry.full_versions import FullVersions, Place
from loraplex_registry.inventory import Inventory, list_files, open_inventory
from loraplex_registry.parity.gate import ParityGate, ParityJudge
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.saturation import Saturations
from loraplex_registry.settings import RegistrySettings, ServerSettings, load_settings
from loraplex_registry.storage.probe import StoreStep, check_store_url, probe_store
from loraplex_registry.storage.store import create_store
from loraplex_registry.uploads.admission import Admission
from loraplex_registry.uploads.checker import Checker, ProcessChecker
from loraplex_registry.uploads.large import LargeUploads
from loraplex_registry.uploads.promotion import promote_ready
from loraplex_registry.uploads.sweep import Sweeper
from loraplex_registry.uploads.upload import Uploads
from loraplex_registry.wire.adapter import AliasView, NamesDelta, VersionView
from loraplex_registry.wire.ending import end_tasks
from loraplex_registry.wire.full import Measured, Replaced
from loraplex_registry.wire.identity import Identity, TokenVerifier
from loraplex_registry.wire.log import note

__all__ = [
    "MESSAGES",
    "AliasView",
    "BrokenAlias",
    "Inventory",
    "Registry",
    "RegistryError",
    "RegistrySettings",
    "StoreStep",
    "TenantRef",
    "Upgrade",
    "check_revision",
    "check_store_url",
    "create_app",
    "create_registry",
    "current",
    "head",
    "knows_revision",
    "list_files",
    "load_settings",
    "open_inventory",
    "probe_store",
    "serves",
    "upgrade",
]
_AUDIENCE = "registry"
_EPOCH_POLL_S = 1.0
_MAX_JSON_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Registry:
    """The registry inside a process; create it anywhere, start and stop it in the loop that serves it."""

    def __init__(self, services: Services, checker: Checker) -> None:
        self.services = services
        self.console = Console(services)
        self._checker = checker
        self._sweeper = Sweeper(services.database, services.store, services.settings)
        self._retention = Retention(services.database, services.settings)
        self._gate = services.gate
        self._full = FullVersions(services.database)
        self._saturations = Saturations(services.database, services.store)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def epoch(self) -> NamesEpoch:
        """The names epoch; `.current` is raised after each commit that changes names, before its answer."""
        return self.services.database.epoch

    async def start(self) -> None:
        """Learn the epoch, then sweep, judge and watch in the background. `check_revision` has checked the schema.

        Raises:
            UnavailableError: The database does not answer.
        """
        await self.services.database.refresh_epoch()
        works = (self._sweeper.run(), self._retention.run(), self._gate.run(), self._watch_epoch())
        self._tasks = [asyncio.create_task(work) for work in works]

    async def stop(self) -> None:
        """End the background work, let running transactions end and close the database."""
        await end_tasks(self._tasks)
        await self._gate.stop()
        self._checker.close()
        await self.services.database.close()
        self.services.store.close()

    async def stop_judging(self) -> None:
        """Ask the judge nothing any more; versions that wait go on waiting until the next start."""
        await self._gate.stop()

    def router(self) -> Router:
        """Return all routes at their public paths; a middleware in front leaves `request.state.identity`."""
        return Router(
            path="/",
            route_handlers=[BaseRoutes, AdapterRoutes, UploadRoutes, AliasRoutes, InternalRoutes],
            dependencies={"services": Provide(lambda: self.services, sync_to_thread=False)},
            exception_handlers={RegistryError: answer_registry_error},
            request_max_body_size=_MAX_JSON_BYTES,
        )

    def know_tenants(self, is_tenant: Callable[[str], bool], is_alive: Callable[[str], bool]) -> None:
        """Ask the owner of tenants about them from now on.

        Args:
            is_tenant: Whether a name is a tenant's; a base may not take it, though no adapter bears it yet.
            is_alive: Whether the tenant of an id is there still. Asked under the lock on names: adapters deleted after
                it has turned false stay deleted, since no upload publishes any more.
        """
        self.services.bases.is_tenant = is_tenant
        self.services.admission.is_alive = is_alive

    def know_gateways(self, publish: Callable[[int], Awaitable[None]]) -> None:
        """Tell other gateways from now on of each epoch that is committed, before whoever changed names is answered.

        Args:
            publish: Tells them; returns once none of them is behind that epoch.
        """
        self.services.database.publish_epoch = publish

    async def refresh_epoch(self) -> int:
        """Learn the epoch that is committed, by whatever process, and return it.

        Raises:
            UnavailableError: The database does not answer.
        """
        return await self.services.database.refresh_epoch()

    def know_engines(
        self, forget_failure: Callable[[str], Awaitable[None]], forget: Callable[[str, Iterable[str]], None]
    ) -> None:
        """Tell the owner of engines from now on what they shall forget.

        Args:
            forget_failure: That a digest failed or did harm.
            forget: Content of a base of which versions are gone; it may still have other names. Must return at once.
        """
        self.services.lifecycle.forget_failure = forget_failure
        self.services.lifecycle.forget = forget

    def know_parity(self, judge: ParityJudge, on_outcome: Callable[[str], None]) -> None:
        """Let the owner of engines measure versions from now on, before they are ready.

        Args:
            judge: Measures.
            on_outcome: Told of each verdict (pass, warn, fail) once it is committed. Must return at once.
        """
        self._gate.judge = judge
        self._gate.on_outcome = on_outcome

    def know_uploads(
        self, on_admitted: Callable[[int, int], None], on_refused: Callable[[Collection[str]], None]
    ) -> None:
        """Tell whoever counts of each upload from now on; trials without effect are not told of.

        Args:
            on_admitted: Told of the status (201: a new version, 200: content that was there) and the bytes of files.
            on_refused: Told of the names of the checks that failed.
        """
        self.services.admission.on_admitted = on_admitted
        self.services.admission.on_refused = on_refused

    async def quarantine_failed(self, digest: str, message: str, by: Identity) -> int:
        """Quarantine what no engine can load (see `Lifecycle.quarantine_failed`)."""
        return await self.services.lifecycle.quarantine_failed(digest, message, by)

    async def find_broken_aliases(self) -> Sequence[BrokenAlias]:
        """Return the aliases that lead to versions which are not there (see `Aliases.find_broken`)."""
        return await self.services.aliases.find_broken()

    async def mend_alias(self, tenant: TenantRef, adapter: str, alias: str, by: Identity) -> AliasView | None:
        """Let a broken alias lead to what is there, or delete it (see `Aliases.mend`)."""
        return await self.services.aliases.mend(tenant, adapter, alias, by)

    async def names_delta(self, since: int) -> NamesDelta:
        """Return every adapter and base that changed after epoch `since`.

        Raises:
            UnavailableError: The database does not answer.
        """
        return await read_delta(self.services.database, since, is_gated=self.services.settings.is_gated)

    async def register_base(self, spec: BaseSpec, by: Identity) -> tuple[BaseView, bool]:
        """Register a base (see `BaseModels.register`)."""
        return await self.services.bases.register(spec, by)

    async def count_adapters(self, by: Identity, /) -> int:
        """Return how many adapters the target tenant of `by` has."""
        return await self.services.lifecycle.count(_target_of(by))

    async def delete_adapters(self, by: Identity, /) -> int:
        """Delete all adapters of the target tenant of `by` in one transaction and return how many there were."""
        return await self.services.lifecycle.delete_all(_target_of(by), by)

    async def measure_saturation(self, by: Identity, adapter: str, number: int | None) -> Measured:
        """Say how much of its rank a stored LoRA of the target tenant of `by` uses (see `Saturations.measure`)."""
        return await self._saturations.measure(_target_of(by), adapter, number)

    async def register_full(self, by: Identity, adapter: str, escalation: str, pool: str, digest: str) -> VersionView:
        """Give an adapter of the target tenant of `by` a full fine-tune (see `FullVersions.register`)."""
        return await self._full.register(_place_of(by, adapter, escalation), pool, digest, by)

    async def activate_full(self, by: Identity, adapter: str, escalation: str) -> tuple[VersionView, Replaced]:
        """Point `live` to the escalation's full fine-tune (see `FullVersions.activate`)."""
        return await self._full.activate(_place_of(by, adapter, escalation), by)

    async def revert_full(self, by: Identity, adapter: str, escalation: str) -> None:
        """Point `live` back (see `FullVersions.revert`)."""
        await self._full.revert(_place_of(by, adapter, escalation), by)

    async def withdraw_full(self, by: Identity, adapter: str, escalation: str) -> None:
        """Point `live` back and retire the full fine-tune (see `FullVersions.withdraw`)."""
        await self._full.withdraw(_place_of(by, adapter, escalation), by)

    async def _watch_epoch(self) -> None:
        """Learn of changes that other processes on the same database have committed."""
        while True:
            await asyncio.sleep(_EPOCH_POLL_S)
            try:
                await self.services.database.refresh_epoch()
            except RegistryError as error:
                _log.warning("the names epoch cannot be read: %s", error)


def _target_of(by: Identity) -> TenantRef:
    assert by.target_tenant is not None, "the gateway names the tenant"
    return find_target(by, by.target_tenant)


def _place_of(by: Identity, adapter: str, escalation: str) -> Place:
    return Place(_target_of(by), adapter, escalation)


def create_registry(settings: RegistrySettings, *, checker: Checker | None = None) -> Registry:
    """Compose a registry; adapters are checked in processes unless `checker` says otherwise.

    Raises:
        SettingError: A setting is not valid, or the store's folder cannot be made.
    """
    database = Database(settings.database_url, settings.database_pool_size)
    store = create_store(settings.object_store_url, settings.scratch_dir, settings.object_store_public_url)
    gate = ParityGate(database, settings, promote_ready)
    checker = checker or ProcessChecker(settings.max_checks)
    admission = Admission(database, store, checker, settings, gate)
    services = Services(
        settings=settings,
        database=database,
        store=store,
        bases=BaseModels(database),
        lifecycle=Lifecycle(database),
        aliases=Aliases(database),
        gate=gate,
        admission=admission,
        uploads=Uploads(database, admission, settings),
        large_uploads=LargeUploads(database, store, admission),
    )
    return Registry(services, checker)


def create_app(
    settings: ServerSettings,
    *,
    checker: Checker | None = None,
    on_start: Callable[[TokenVerifier], None] = lambda _: None,
) -> Litestar:
    """Return the registry as an app of its own: every route but `/healthz` needs a token of the gateway.

    Args:
        settings: What it is told.
        checker: Checks adapters; default in processes.
        on_start: Given the verifier of tokens in the loop that serves, once it does.

    Raises:
        SettingError: A setting is not valid.
    """
    registry = create_registry(settings.registry, checker=checker)
    verifier = TokenVerifier(settings.verify_keys, _AUDIENCE)
    metrics = RegistryMetrics()
    registry.know_uploads(metrics.count_admitted, metrics.count_refused)
    registry.services.gate.on_outcome = metrics.count_parity

    @contextlib.asynccontextmanager
    async def life(_: Litestar) -> AsyncIterator[None]:
        await registry.start()
        on_start(verifier)
        try:
            yield
        finally:
            await registry.stop()

    return Litestar(
        route_handlers=[registry.router(), _healthz, build_metrics_route(metrics)],
        state=State({"registry": registry}),
        lifespan=[life],
        middleware=[DefineMiddleware(_TokenMiddleware, verifier=verifier)],
        exception_handlers={
            RegistryError: answer_registry_error,
            HTTPException: answer_http_error,
            Exception: answer_mistake,
        },
        openapi_config=None,
        logging_config=None,
    )


@get("/healthz", sync_to_thread=False)
def _healthz() -> dict[str, str]:
    """Say that the process is alive."""
    return {"status": "ok"}


class _TokenMiddleware:
    """Leaves the identity of a valid token on the request; handlers refuse a request without one."""

    def __init__(self, app: ASGIApp, verifier: TokenVerifier) -> None:
        self._app = app
        self._verifier = verifier

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == ScopeType.HTTP:
            request: Request[Any, Any, Any] = Request(scope)
            identity = request.state.identity = self._find_identity(request)
            if identity is not None:
                note(request_id=identity.request_id, tenant=identity.tenant, key_id=identity.key_id)
        await self._app(scope, receive, send)

    def _find_identity(self, request: Request[Any, Any, Any]) -> Identity | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        try:
            return self._verifier.verify(token.strip())
        except TokenError:
            # The engine key is no token; its routes compare it themselves.
            return None
