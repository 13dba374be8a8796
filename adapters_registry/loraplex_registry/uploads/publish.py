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

from loraplex_registry.adapters.alias_row import set_targets
from loraplex_registry.adapters.lookup import find_adapter, find_alias, find_live
from loraplex_registry.adapters.view import LIVE, read_targets, show_version
from loraplex_registry.db.database import Change
from loraplex_registry.db.model import AdapterRow, BaseRow, VersionRow
from loraplex_registry.errors import ConflictError, QuarantinedError
from loraplex_registry.events import record_event
from loraplex_registry.peft.spec import AdapterPlan
from loraplex_registry.storage.store import ObjectStore
from loraplex_registry.uploads.order import UploadOrder, UploadResult
from loraplex_registry.wire.adapter import Manifest, Report, Target

FULL_WEIGHT = 100


class ArtifactVanishedError(Exception):
    """The sweeper took the artifact between storing and publishing: store it again and repeat."""


@dataclass(frozen=True)
class Seen:
    """What was there when the upload began: adapter, revision of its alias `live` (0 if never set), all bases."""

    adapter: AdapterRow | None
    live_revision: int
    bases: Sequence[BaseRow]


@dataclass(frozen=True)
class Candidate:
    """An adapter that passed its checks and whose artifact is stored; `places` says where each file lies in it."""

    base: BaseRow
    plan: AdapterPlan
    report: Report
    manifest: Manifest
    places: Mapping[str, str]


async def publish(
    order: UploadOrder, seen: Seen, candidate: Candidate, store: ObjectStore, change: Change
) -> UploadResult:
    """Publish a candidate as the adapter's next version, or find the version that has the same content.

    Raises:
        ConflictError: The adapter belongs to another base.
        QuarantinedError: The same content is quarantined here.
        ArtifactVanishedError: The artifact is no longer in the store.
    """
    adapter = await _find_or_create_adapter(change, order, candidate)
    version = await _find_same(change, adapter, candidate.plan.digest)
    is_new = version is None
    if version is None:
        if await asyncio.to_thread(store.find_manifest, candidate.plan.digest) is None:
            raise ArtifactVanishedError
        version = _create_version(change, order, adapter, candidate)
        await change.session.flush()
    if version.state == "quarantined":
        raise QuarantinedError(
            f"The same content is version {version.number}, which is quarantined; an admin must release it, "
            "or upload other content"
        )
    await _promote(change, order, seen, version)
    _record(change, order, version, is_new=is_new)
    view = show_version(version, await find_live(change.session, adapter.id))
    return UploadResult(201 if is_new else 200, view)


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


async def _find_same(change: Change, adapter: AdapterRow, digest: str) -> VersionRow | None:
    found = await change.session.execute(
        sa.select(VersionRow).where(
            VersionRow.adapter_id == adapter.id, VersionRow.digest == digest, VersionRow.state != "purged"
        )
    )
    return found.scalar_one_or_none()


def _create_version(change: Change, order: UploadOrder, adapter: AdapterRow, candidate: Candidate) -> VersionRow:
    number, adapter.next_number = adapter.next_number, adapter.next_number + 1
    files = candidate.manifest.files
    version = VersionRow(
        adapter_id=adapter.id,
        adapter=adapter,
        number=number,
        kind="lora",
        digest=candidate.plan.digest,
        state="ready",
        rank=candidate.plan.rank,
        target_modules=list(candidate.plan.target_modules),
        num_parameters=candidate.plan.num_parameters,
        size_bytes=sum(file.size for file in files),
        files=[{**msgspec.to_builtins(file), "place": candidate.places[file.name]} for file in files],
        report=msgspec.to_builtins(candidate.report),
        created_by=order.by.actor,
    )
    change.session.add(version)
    return version


async def _promote(change: Change, order: UploadOrder, seen: Seen, version: VersionRow) -> None:
    """Move `live` here if the order says so and, for `always`, if nobody moved it since the upload began.

    For `auto` nothing is live if `live` points to quarantined versions alone.
    """
    if version.state != "ready" or order.promote == "never":
        return
    alias = await find_alias(change.session, version.adapter_id, LIVE)
    revision, targets = (alias.revision, alias.targets) if alias is not None else (0, [])
    if order.promote == "auto" and await _has_ready(change, version.adapter_id, targets):
        return
    is_same_adapter = seen.adapter is None or seen.adapter.id == version.adapter_id
    if order.promote == "always" and not (is_same_adapter and seen.live_revision == revision):
        return
    target = Target(version.number, FULL_WEIGHT)
    if targets != [msgspec.to_builtins(target)]:
        await set_targets(change, version.adapter, LIVE, [target], "upload", order.by.actor)


async def _has_ready(change: Change, adapter_id: uuid.UUID, targets: Sequence[Any]) -> bool:
    numbers = [target.version for target in read_targets(targets)]
    query = sa.select(VersionRow.id).where(
        VersionRow.adapter_id == adapter_id, VersionRow.number.in_(numbers), VersionRow.state == "ready"
    )
    return (await change.session.execute(query.limit(1))).first() is not None


def _record(change: Change, order: UploadOrder, version: VersionRow, *, is_new: bool) -> None:
    record_event(
        change.session,
        order.by,
        "adapter.version_created" if is_new else "adapter.version_repeated",
        f"{order.tenant.name}/{order.adapter}@{version.number}",
        tenant_id=order.tenant.id,
        tenant=order.tenant.name,
        details={"digest": version.digest, "promote": order.promote, "forced_base": order.base is not None},
    )
