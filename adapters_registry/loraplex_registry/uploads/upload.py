"""The path of an upload: staging, checks, object, then version, alias and event in one transaction.

Whatever goes wrong before the transaction leaves nothing but an event; an object without a row is the sweeper's.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.adapters.lookup import find_adapter, find_alias, list_bases
from loraplex_registry.adapters.view import LIVE, build_spec
from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import BaseRow
from loraplex_registry.errors import (
    AdapterRejectedError,
    NotFoundError,
    StoreUnavailableError,
)
from loraplex_registry.events import record_event
from loraplex_registry.peft.file_rule import WEIGHTS_FILE
from loraplex_registry.peft.report import Check
from loraplex_registry.peft.rewrite import drop_tensors
from loraplex_registry.peft.spec import AdapterPlan
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.storage.store import ObjectStore
from loraplex_registry.uploads.base_choice import build_refusal, choose_base
from loraplex_registry.uploads.checker import Checker
from loraplex_registry.uploads.idempotency import IdempotencyKeys
from loraplex_registry.uploads.order import DryRunView, StagedFile, UploadOrder, UploadResult
from loraplex_registry.uploads.publish import ArtifactVanishedError, Candidate, Seen, publish
from loraplex_registry.uploads.receive import receive
from loraplex_registry.wire.adapter import Manifest, Report
from loraplex_registry.wire.naming import check_name

_MAX_STORE_TRIES = 3
_PARITY_NOT_RUN = Check(
    "parity", "warn", "Nothing to do: uploads are not compared with PEFT's answers yet; the exact checks above passed."
)


class Uploads:
    """Admits adapters; the only writer of versions and of objects."""

    def __init__(self, database: Database, store: ObjectStore, checker: Checker, settings: RegistrySettings) -> None:
        self._database = database
        self._store = store
        self._checker = checker
        self._settings = settings
        self._keys = IdempotencyKeys(database)
        self.is_alive: Callable[[str], bool] = lambda _: True
        """Whether the tenant of an id is there still; the gateway, which owns tenants, says so."""

    async def upload(self, order: UploadOrder, body: AsyncIterator[bytes]) -> UploadResult:
        """Admit an adapter.

        Args:
            order: What is asked for; scope and tenant are judged already.
            body: The multipart body as it arrives.

        Raises:
            AdapterRejectedError: It cannot be served exactly; carries the report.
            RegistryError: The request is at fault, or the registry is not able; nothing was stored.
        """
        check_name(order.adapter, "adapter")
        seen = await self._look(order)
        route = f"POST {order.tenant.name}/{order.adapter}/versions"
        async with self._refusals_recorded(order), self._keys.hold(order, route) as claim, self._staging() as folder:
            files = await receive(body, order.boundary, folder, self._settings.max_upload_bytes)
            content = _hash_order(order, files)
            result = claim.find_answer(content) or await self._admit(order, seen, files)
            await self._keys.finish(claim, content, result)
            return result

    async def _admit(self, order: UploadOrder, seen: Seen, files: Mapping[str, StagedFile]) -> UploadResult:
        base = await choose_base(order, seen, files)
        report, plan = await self._check(order, files, base)
        if plan is None:
            raise build_refusal(report)
        if order.is_dry_run:
            view = DryRunView(dry_run=True, base_model=base.name, digest=plan.digest, report=report)
            return UploadResult(200, view)
        return await self._store_and_publish(order, seen, base, plan, report, files)

    async def _look(self, order: UploadOrder) -> Seen:
        """Return what is there before the body is read: `always` is a compare-and-set against this."""
        async with self._database.read() as session:
            adapter = await find_adapter(session, order.tenant, order.adapter)
            alias = await find_alias(session, adapter.id, LIVE) if adapter is not None else None
            return Seen(adapter, alias.revision if alias is not None else 0, await list_bases(session))

    async def _check(
        self, order: UploadOrder, files: Mapping[str, StagedFile], base: BaseRow
    ) -> tuple[Report, AdapterPlan | None]:
        verdict = await self._checker.check(
            {name: file.path for name, file in files.items()},
            build_spec(base),
            forced_base=order.base is not None,
            timeout_s=order.wait_s,
        )
        if verdict.plan is None or self._settings.parity_gate == "off":
            return verdict.report, verdict.plan
        return verdict.report.with_check(_PARITY_NOT_RUN), verdict.plan

    async def _store_and_publish(
        self,
        order: UploadOrder,
        seen: Seen,
        base: BaseRow,
        plan: AdapterPlan,
        report: Report,
        files: Mapping[str, StagedFile],
    ) -> UploadResult:
        files = await asyncio.to_thread(_without_copies, files, plan.dropped)
        manifest = _build_manifest(plan, files)
        paths = {name: file.path for name, file in files.items()}
        for _ in range(_MAX_STORE_TRIES):
            places = await asyncio.to_thread(self._store.put, manifest, paths)
            candidate = Candidate(base, plan, report, manifest, places)
            try:
                return await self._database.change(partial(self._publish, order, seen, candidate))
            except ArtifactVanishedError:
                continue
        raise StoreUnavailableError(f"{plan.digest} does not stay in the store")

    async def _publish(self, order: UploadOrder, seen: Seen, candidate: Candidate, change: Change) -> UploadResult:
        # NOTE: only here, under the lock on names: the tenant may have been deleted while its upload was on its way
        if not self.is_alive(order.tenant.id):
            raise NotFoundError(f"The tenant {order.tenant.name} was deleted meanwhile", param="tenant")
        return await publish(order, seen, candidate, self._store, change)

    @asynccontextmanager
    async def _refusals_recorded(self, order: UploadOrder) -> AsyncIterator[None]:
        try:
            yield
        except AdapterRejectedError as refusal:
            if not order.is_dry_run:
                await self._record_refusal(order, refusal)
            raise

    async def _record_refusal(self, order: UploadOrder, refusal: AdapterRejectedError) -> None:
        async def work(session: AsyncSession) -> None:
            record_event(
                session,
                order.by,
                "adapter.refused",
                f"{order.tenant.name}/{order.adapter}",
                tenant_id=order.tenant.id,
                tenant=order.tenant.name,
                details={"report": msgspec.to_builtins(refusal.report)},
            )

        await self._database.write(work)

    @asynccontextmanager
    async def _staging(self) -> AsyncIterator[Path]:
        folder = await asyncio.to_thread(self._store.create_staging)
        try:
            yield folder
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


def _build_manifest(plan: AdapterPlan, files: Mapping[str, StagedFile]) -> Manifest:
    return Manifest(
        digest=plan.digest,
        base_fingerprint=plan.base_fingerprint,
        files=tuple(file.describe(name) for name, file in sorted(files.items())),
        config=plan.config,
        dropped=plan.dropped,
    )


def _without_copies(files: Mapping[str, StagedFile], dropped: Collection[str]) -> Mapping[str, StagedFile]:
    """The files as they are stored: the base's matrices are left out of the weights."""
    if not dropped:
        return files
    whole = files[WEIGHTS_FILE]
    path = whole.path.with_name(f"{whole.path.name}-kept")
    drop_tensors(whole.path, path, dropped)
    with path.open("rb") as file:
        kept = StagedFile(path, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
    return {**files, WEIGHTS_FILE: kept}


def _hash_order(order: UploadOrder, files: Mapping[str, StagedFile]) -> str:
    """Return what an Idempotency-Key stands for: the parameters and the contents."""
    contents = sorted((name, file.sha256) for name, file in files.items())
    return hashlib.sha256(msgspec.json.encode([order.promote, order.is_dry_run, order.base, contents])).hexdigest()
