"""The one writer of alias rows and their history; every change is a new revision, deletion too.

The first adapter of a tenant that gets a `live` alias becomes the tenant's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import sqlalchemy as sa

from loraplex_registry.adapters.lookup import find_alias
from loraplex_registry.adapters.view import LIVE
from loraplex_registry.db.database import Change
from loraplex_registry.db.model import AdapterRow, AliasHistoryRow, AliasRow
from loraplex_registry.wire.adapter import Target


async def set_targets(
    change: Change, adapter: AdapterRow, name: str, targets: Sequence[Target], action: str, actor: str
) -> AliasRow:
    """Point alias `name` of `adapter` to `targets` (none deletes it) as its next revision, and return its row.

    Args:
        change: The transaction, which holds the lock on names.
        adapter: Marked as changed.
        name: Of the alias; its row is created if there never was one.
        targets: Judged already.
        action: `set`, `rollback`, `upload` or `delete`, for the history.
        actor: Who did it.
    """
    at = datetime.now(UTC)
    alias = await find_alias(change.session, adapter.id, name)
    if alias is None:
        alias = AliasRow(adapter_id=adapter.id, name=name, revision=0)
        change.session.add(alias)
    alias.revision += 1
    alias.targets = msgspec.to_builtins(sorted(targets, key=lambda target: target.version))
    alias.updated_at = at
    await change.session.flush()
    change.session.add(
        AliasHistoryRow(
            alias_id=alias.id,
            revision=alias.revision,
            targets=alias.targets,
            action=action,
            actor=actor,
            created_at=at,
        )
    )
    adapter.changed_epoch = change.epoch
    if name == LIVE and targets:
        await _make_default_if_none(change, adapter)
    return alias


async def make_default(change: Change, adapter: AdapterRow) -> None:
    """Make `adapter` the one that its tenant's bare name means."""
    former = await _find_default(change, adapter.tenant_id)
    if former is not None and former.id != adapter.id:
        former.is_default = False
        former.changed_epoch = change.epoch
        # Before the next one is set: there is at most one default at any moment.
        await change.session.flush()
    adapter.is_default = True
    adapter.changed_epoch = change.epoch


async def _make_default_if_none(change: Change, adapter: AdapterRow) -> None:
    if await _find_default(change, adapter.tenant_id) is None:
        adapter.is_default = True


async def _find_default(change: Change, tenant_id: str) -> AdapterRow | None:
    found = await change.session.execute(
        sa.select(AdapterRow).where(AdapterRow.tenant_id == tenant_id, AdapterRow.is_default)
    )
    return found.scalar_one_or_none()
