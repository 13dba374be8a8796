"""Moves the alias `live` to a version that has become ready, if its upload asked for that and may still have it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from loraplex_registry.adapters.alias_row import set_targets
from loraplex_registry.adapters.lookup import find_alias
from loraplex_registry.adapters.pending import Pending
from loraplex_registry.adapters.view import LIVE, read_targets
from loraplex_registry.db.database import Change
from loraplex_registry.db.model import AdapterRow, VersionRow
from loraplex_registry.events import record_event
from loraplex_registry.wire.adapter import Target

FULL_WEIGHT = 100


async def promote_ready(change: Change, version: VersionRow, pending: Pending) -> bool:
    """Point `live` to a ready version and return whether it is there now.

    *Semantics*: `never` moves nothing; `auto` moves unless a ready version is live (quarantined ones do not count);
    `always` moves unless somebody moved `live` since the upload began. Only versions that are `ready`, of an adapter
    that is not deleted, become live.

    Args:
        change: The transaction, which holds the lock on names.
        version: Its state is written already.
        pending: What the upload asked for.
    """
    if version.state != "ready" or version.adapter.deleted_at is not None or pending.promote == "never":
        return False
    alias = await find_alias(change.session, version.adapter_id, LIVE)
    revision, targets = (alias.revision, alias.targets) if alias is not None else (0, [])
    target = Target(version.number, FULL_WEIGHT)
    if targets == [msgspec.to_builtins(target)]:
        return True
    if pending.promote == "auto" and await _has_ready(change, version.adapter_id, targets):
        return False
    if pending.promote == "always" and pending.live_revision != revision:
        return False
    alias = await set_targets(change, version.adapter, LIVE, [target], "upload", pending.actor)
    before = {"revision": revision, "targets": targets} if targets else None
    _record(change, version.adapter, pending, before, {"revision": alias.revision, "targets": alias.targets})
    return True


def _record(
    change: Change, adapter: AdapterRow, pending: Pending, before: dict[str, Any] | None, after: dict[str, Any]
) -> None:
    record_event(
        change.session,
        pending.by(adapter.tenant_id, adapter.tenant),
        "alias.upload",
        f"{adapter.tenant}/{adapter.name}@{LIVE}",
        tenant_id=adapter.tenant_id,
        tenant=adapter.tenant,
        before=before,
        after=after,
    )


async def _has_ready(change: Change, adapter_id: uuid.UUID, targets: Sequence[Any]) -> bool:
    numbers = [target.version for target in read_targets(targets)]
    query = sa.select(VersionRow.id).where(
        VersionRow.adapter_id == adapter_id, VersionRow.number.in_(numbers), VersionRow.state == "ready"
    )
    return (await change.session.execute(query.limit(1))).first() is not None
