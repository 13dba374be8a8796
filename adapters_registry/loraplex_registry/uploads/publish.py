"""Turns a stored artifact into a version: number, alias and event in one transaction.

The transaction holds the lock on names, so uploads of one adapter that end at once get consecutive numbers and none
is lost. It looks at the store again under that lock, as the sweeper does: no row ever names bytes that are gone.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.adapters.lookup import find_adapter, find_live
from loraplex_registry.adapters.pending import Pending, read_pending
from loraplex_registry.adapters.view import show_version
from loraplex_registry.db.database import Change
from loraplex_registry.db.model import AdapterRow, BaseRow, VersionRow
from loraplex_registry.errors import ConflictError, QuarantinedError
from loraplex_registry.events import record_event
from loraplex_registry.peft.spec import AdapterPlan
from loraplex_registry.storage.store import ObjectStore
from loraplex_registry.uploads.order import UploadOrder, UploadResult
from loraplex_registry.uploads.promotion import FULL_WEIGHT, promote_ready
from loraplex_registry.uploads.quota import check_version
from loraplex_registry.wire.adapter import Manifest, Report, Target

_WEAKEST_FIRST = ("never", "auto", "always")


class ArtifactVanishedError(Exception):
    """The sweeper took the artifact between storing and publishing: store it again and repeat."""


@dataclass(frozen=True)
class Seen:
    """What is there: the adapter and all bases; and what `live` was when the upload began.

    That is the adapter's id (None if there was none) and, where it is compared, the revision of its alias `live` (0 if
    never set).
    """

    adapter: AdapterRow | None
    bases: Sequence[BaseRow]
    began_with: uuid.UUID | None
    live_revision: int


@dataclass(frozen=True)
class Candidate:
    """An adapter that passed its checks and whose artifact is stored; `places` says where each file lies in it.

    One that `waits` is not ready before the parity gate has seen it.
    """

    base: BaseRow
    plan: AdapterPlan
    report: Report
    manifest: Manifest
    places: Mapping[str, str]
    waits: bool = False


async def publish(
    order: UploadOrder, seen: Seen, candidate: Candidate, store: ObjectStore, change: Change
) -> UploadResult:
    """Publish a candidate as the adapter's next version, or find the version that has the same content.

    Raises:
        ConflictError: The adapter belongs to another base.
        QuarantinedError: The same content is quarantined here.
        QuotaExceededError: The tenant has no room for it.
        ArtifactVanishedError: The artifact is no longer in the store.
    """
    adapter = await _find_or_create_adapter(change, order, candidate)
    version = await find_same(change.session, adapter, candidate.plan.digest)
    pending = _build_pending(order, seen, adapter)
    is_new = version is None
    if version is None:
        version = await _create_version(change, order, adapter, candidate, pending, store)
    check_admissible(version)
    if version.state == "validating":
        version.pending = msgspec.to_builtins(_stronger(pending, read_pending(version.pending)))
    _record(change, order, version, is_new=is_new)
    is_live = await promote_ready(change, version, pending)
    if is_new:
        # nothing else led to it yet
        live: tuple[Target, ...] = (Target(version.number, FULL_WEIGHT),) if is_live else ()
    else:
        live = await find_live(change.session, adapter.id)
    view = show_version(version, live)
    return UploadResult(201 if is_new else 200, view)


def check_admissible(version: VersionRow) -> None:
    """Return if an upload of the content of `version` may lead to it.

    Raises:
        QuarantinedError: It is quarantined.
    """
    if version.state == "quarantined":
        raise QuarantinedError(
            f"The same content is version {version.number}, which is quarantined; an admin must release it, "
            "or upload other content"
        )


def _build_pending(order: UploadOrder, seen: Seen, adapter: AdapterRow) -> Pending:
    is_same_adapter = seen.began_with is None or seen.began_with == adapter.id
    return Pending(
        promote=order.promote,
        live_revision=seen.live_revision if is_same_adapter else None,
        actor=order.by.actor,
        key_id=order.by.key_id,
        request_id=order.by.request_id,
    )


def _stronger(new: Pending, old: Pending | None) -> Pending:
    """The wish that goes further: whoever asked for less loses nothing."""
    if old is None or _WEAKEST_FIRST.index(new.promote) > _WEAKEST_FIRST.index(old.promote):
        return new
    return old


async def _find_or_create_adapter(change: Change, order: UploadOrder, candidate: Candidate) -> AdapterRow:
    adapter = await find_adapter(change.session, order.tenant, order.adapter)
    if adapter is None:
        return await _create_adapter(change, order, candidate.base)
    if adapter.base_id != candidate.base.id:
        raise ConflictError(
            f"{order.tenant.name}/{order.adapter} belongs to the base {adapter.base.name}", param="base"
        )
    adapter.changed_epoch = change.epoch
    return adapter


async def _create_adapter(change: Change, order: UploadOrder, base: BaseRow) -> AdapterRow:
    """Create the adapter; numbers continue after those of deleted adapters of that name."""
    former = await change.session.execute(
        sa.select(sa.func.max(AdapterRow.next_number)).where(
            AdapterRow.tenant_id == order.tenant.id, AdapterRow.name == order.adapter
        )
    )
    adapter = AdapterRow(
        tenant_id=order.tenant.id,
        tenant=order.tenant.name,
        name=order.adapter,
        base_id=base.id,
        base=await change.session.merge(base, load=False),
        is_default=False,
        next_number=former.scalar_one() or 1,
        created_by=order.by.actor,
        changed_epoch=change.epoch,
    )
    change.session.add(adapter)
    await change.session.flush()
    return adapter


async def find_same(session: AsyncSession, adapter: AdapterRow, digest: str) -> VersionRow | None:
    """Return the adapter's version of this content that is not purged."""
    found = await session.execute(
        sa.select(VersionRow).where(
            VersionRow.adapter_id == adapter.id, VersionRow.digest == digest, VersionRow.state != "purged"
        )
    )
    return found.scalar_one_or_none()


async def _create_version(
    change: Change, order: UploadOrder, adapter: AdapterRow, candidate: Candidate, pending: Pending, store: ObjectStore
) -> VersionRow:
    files, digest = candidate.manifest.files, candidate.plan.digest
    size_bytes = sum(file.size for file in files)
    await check_version(change.session, order.tenant.id, order.limits, size_bytes)
    if await asyncio.to_thread(store.find_manifest, digest) is None:
        raise ArtifactVanishedError
    number, adapter.next_number = adapter.next_number, adapter.next_number + 1
    version = VersionRow(
        adapter_id=adapter.id,
        adapter=adapter,
        number=number,
        kind="lora",
        digest=digest,
        state="validating" if candidate.waits else "ready",
        pending=msgspec.to_builtins(pending) if candidate.waits else None,
        rank=candidate.plan.rank,
        target_modules=list(candidate.plan.target_modules),
        num_parameters=candidate.plan.num_parameters,
        size_bytes=size_bytes,
        files=[{**msgspec.to_builtins(file), "place": candidate.places[file.name]} for file in files],
        report=msgspec.to_builtins(candidate.report),
        created_by=order.by.actor,
    )
    change.session.add(version)
    await change.session.flush()
    return version


def _record(change: Change, order: UploadOrder, version: VersionRow, *, is_new: bool) -> None:
    record_event(
        change.session,
        order.by,
        "adapter.version_created" if is_new else "adapter.version_repeated",
        f"{order.tenant.name}/{order.adapter}@{version.number}",
        tenant_id=order.tenant.id,
        tenant=order.tenant.name,
        before=None if is_new else _describe(version),
        after=_describe(version),
        details={"digest": version.digest, "promote": order.promote, "forced_base": order.base is not None},
    )


def _describe(version: VersionRow) -> dict[str, Any]:
    return {"state": version.state, "digest": version.digest}
