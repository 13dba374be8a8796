"""The path from files on our disk to a version, for both ways of uploading: checks, object, then one transaction.

Whatever goes wrong before the transaction leaves nothing but an event; an object without a row is the sweeper's.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.adapters.lookup import find_adapter, find_alias, find_live, get_version, list_bases
from loraplex_registry.adapters.view import LIVE, build_spec, show_version
from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import BaseRow
from loraplex_registry.errors import AdapterRejectedError, NotFoundError, StoreUnavailableError
from loraplex_registry.events import record_event
from loraplex_registry.parity.gate import NOT_RUN, ParityGate
from loraplex_registry.peft.file_rule import WEIGHTS_FILE
from loraplex_registry.peft.rewrite import drop_tensors
from loraplex_registry.peft.spec import AdapterPlan
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.storage.store import ObjectStore
from loraplex_registry.uploads.base_choice import build_refusal, choose_base, find_forced
from loraplex_registry.uploads.checker import Checker
from loraplex_registry.uploads.order import DryRunView, StagedFile, UploadOrder, UploadResult
from loraplex_registry.uploads.publish import (
    ArtifactVanishedError,
    Candidate,
    Seen,
    check_admissible,
    find_same,
    publish,
)
from loraplex_registry.uploads.quota import check_announced, check_version, judge_rank
from loraplex_registry.wire.adapter import Manifest, Report, VersionView

_MAX_STORE_TRIES = 3

AlsoWrite = Callable[[Change, UploadResult], Awaitable[None]]
"""What shall be written in the transaction that publishes, or not at all."""


class Admission:
    """Admits adapters whose files are on our disk; the only writer of versions that are new, and of objects."""

    def __init__(
        self, database: Database, store: ObjectStore, checker: Checker, settings: RegistrySettings, gate: ParityGate
    ) -> None:
        self._database = database
        self._store = store
        self._checker = checker
        self._settings = settings
        self._gate = gate
        self.is_alive: Callable[[str], bool] = lambda _: True
        """Whether the tenant of an id is there still; the gateway, which owns tenants, says so."""
        self.on_admitted: Callable[[int, int], None] = lambda status, num_bytes: None  # noqa: ARG005
        """Told of each upload that was admitted: 201 or, for content that was there, 200; and the bytes of files."""
        self.on_refused: Callable[[Collection[str]], None] = lambda checks: None  # noqa: ARG005
        """Told of each that was refused, and the checks that it failed."""

    async def look(self, order: UploadOrder) -> Seen:
        """Return what is there before bytes are read: `always` is a compare-and-set against this.

        Raises:
            ConflictError: The adapter belongs to another base than an admin named.
            NotFoundError: There is no base of that name.
        """
        async with self._database.read() as session:
            adapter = await find_adapter(session, order.tenant, order.adapter)
            alias = None
            if adapter is not None and order.promote == "always":
                alias = await find_alias(session, adapter.id, LIVE)
            seen = Seen(
                adapter=adapter,
                bases=await list_bases(session),
                began_with=None if adapter is None else adapter.id,
                live_revision=alias.revision if alias is not None else 0,
            )
        find_forced(order, seen)
        return seen

    async def check_room(self, order: UploadOrder, num_bytes: int) -> None:
        """Return if the tenant has room for an upload of `num_bytes`, before they are read.

        Raises:
            QuotaExceededError: It has not.
        """
        if order.limits.adapter_bytes is not None:
            async with self._database.read() as session:
                await check_announced(session, order.tenant.id, order.limits, num_bytes)

    async def admit(
        self, order: UploadOrder, seen: Seen, files: Mapping[str, StagedFile], also: AlsoWrite | None = None
    ) -> UploadResult:
        """Check, store and publish, and wait for the parity gate as long as the order says.

        Args:
            order: What is asked for.
            seen: What `look` returned when the upload began.
            files: On our disk, by name; they stay where they are.
            also: What the transaction that publishes shall write, too.

        Raises:
            AdapterRejectedError: It cannot be served exactly; carries the report.
            RegistryError: The request is at fault, or the registry is not able; nothing is published.
        """
        until = time.monotonic() + order.wait_s
        base = await choose_base(order, seen, files)
        report, plan = await self._check(order, files, base)
        if plan is None:
            raise build_refusal(report)
        if order.is_dry_run:
            return await self._show_dry_run(order, base, plan, report)
        result = await self._store_and_publish(order, seen, base, (report, plan), files, also)
        self.on_admitted(result.status, sum(file.size for file in files.values()))
        return await self.settle(order, result, max(0.0, until - time.monotonic()))

    async def settle(self, order: UploadOrder, result: UploadResult, timeout_s: float) -> UploadResult:
        """Return the result with the state that its version has reached, at the latest after `timeout_s` seconds."""
        view = result.body
        if not isinstance(view, VersionView) or view.state != "validating":
            return result
        try:
            async with self._database.read() as session:
                version = await get_version(session, order.tenant, order.adapter, view.version)
            if version.state == "validating":
                self._gate.submit(version.id)
                await self._gate.wait(version.id, timeout_s)
            async with self._database.read() as session:
                version = await get_version(session, order.tenant, order.adapter, view.version)
                return UploadResult(result.status, show_version(version, await find_live(session, version.adapter_id)))
        except NotFoundError:
            # deleted meanwhile, which the upload need not know
            return result

    @asynccontextmanager
    async def refusals_recorded(self, order: UploadOrder) -> AsyncIterator[None]:
        """Leave an event if the body refuses the adapter."""
        try:
            yield
        except AdapterRejectedError as refusal:
            if not order.is_dry_run:
                self.on_refused({check.name for check in refusal.report.checks if check.verdict == "fail"})
                await self._record_refusal(order, refusal)
            raise

    @asynccontextmanager
    async def staging(self) -> AsyncIterator[Path]:
        """Yield a private folder on the store's disk and remove it afterwards."""
        folder = await asyncio.to_thread(self._store.create_staging)
        try:
            yield folder
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    async def _check(
        self, order: UploadOrder, files: Mapping[str, StagedFile], base: BaseRow
    ) -> tuple[Report, AdapterPlan | None]:
        verdict = await self._checker.check(
            {name: file.path for name, file in files.items()},
            build_spec(base),
            forced_base=order.base is not None,
            timeout_s=order.wait_s,
        )
        if verdict.plan is None:
            return verdict.report, None
        report = judge_rank(verdict.report, order.limits, verdict.plan.rank)
        if report.verdict == "fail":
            return report, None
        if self._settings.parity_gate != "off" and not self._gate.applies_to(base.name):
            report = report.with_check(NOT_RUN)
        return report, verdict.plan

    async def _show_dry_run(self, order: UploadOrder, base: BaseRow, plan: AdapterPlan, report: Report) -> UploadResult:
        async with self._database.read() as session:
            adapter = await find_adapter(session, order.tenant, order.adapter)
            same = None if adapter is None else await find_same(session, adapter, plan.digest)
            if same is None:
                await check_version(session, order.tenant.id, order.limits, 0)
            else:
                check_admissible(same)
        view = DryRunView(dry_run=True, base_model=base.name, digest=plan.digest, report=report)
        return UploadResult(200, view)

    async def _store_and_publish(
        self,
        order: UploadOrder,
        seen: Seen,
        base: BaseRow,
        judged: tuple[Report, AdapterPlan],
        files: Mapping[str, StagedFile],
        also: AlsoWrite | None,
    ) -> UploadResult:
        report, plan = judged
        files = await asyncio.to_thread(_without_copies, files, plan.dropped)
        manifest = _build_manifest(plan, files)
        paths = {name: file.path for name, file in files.items()}
        waits = all(check.name != NOT_RUN.name for check in report.checks) and self._gate.applies_to(base.name)
        for _ in range(_MAX_STORE_TRIES):
            places = await asyncio.to_thread(self._store.put, manifest, paths)
            candidate = Candidate(base, plan, report, manifest, places, waits)
            try:
                return await self._database.change(partial(self._publish, order, seen, candidate, also))
            except ArtifactVanishedError:
                continue
        raise StoreUnavailableError(f"{plan.digest} does not stay in the store")

    async def _publish(
        self, order: UploadOrder, seen: Seen, candidate: Candidate, also: AlsoWrite | None, change: Change
    ) -> UploadResult:
        # NOTE: only here, under the lock on names: the tenant may have been deleted while its upload was on its way
        if not self.is_alive(order.tenant.id):
            raise NotFoundError(f"The tenant {order.tenant.name} was deleted meanwhile", param="tenant")
        result = await publish(order, seen, candidate, self._store, change)
        if also is not None:
            await also(change, result)
        return result

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


def hash_order(order: UploadOrder, files: Mapping[str, str]) -> str:
    """Return what an Idempotency-Key stands for: the parameters, and the sha256 of each file by name."""
    contents = sorted(files.items())
    return hashlib.sha256(msgspec.json.encode([order.promote, order.is_dry_run, order.base, contents])).hexdigest()


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
