"""What gateways learn of names: all that changed after an epoch, from one snapshot."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.adapters.view import read_quarantine, read_targets
from loraplex_registry.db.database import Database
from loraplex_registry.db.model import AdapterRow, AliasRow, BaseRow, EpochRow, VersionRow
from loraplex_registry.wire.adapter import AdapterName, BaseName, NamesDelta, VersionName
from loraplex_registry.wire.limits import read_limits

_VERSION_COLUMNS = (
    VersionRow.adapter_id,
    VersionRow.number,
    VersionRow.digest,
    VersionRow.state,
    VersionRow.kind,
    VersionRow.rank,
    VersionRow.quarantine,
    VersionRow.pool,
    VersionRow.weights_digest,
)


async def read_delta(database: Database, since: int, *, is_gated: bool = True) -> NamesDelta:
    """Return every adapter and base that changed after epoch `since`, deleted adapters marked so.

    An epoch that was never reached (the database was put back to an older state) gives everything. Without the parity
    gate no version is bound to the weights that it was compared on.

    Raises:
        UnavailableError: The database does not answer.
    """
    async with database.read() as session:
        epoch = (await session.execute(sa.select(EpochRow.epoch))).scalar_one()
        since = since if 0 <= since <= epoch else 0
        adapters = await _read_adapters(session, since, is_gated=is_gated)
        bases = (await session.execute(sa.select(BaseRow).where(BaseRow.changed_epoch > since))).scalars()
        return NamesDelta(epoch=epoch, adapters=adapters, bases=tuple(_show_base(base) for base in bases))


async def _read_adapters(session: AsyncSession, since: int, *, is_gated: bool) -> tuple[AdapterName, ...]:
    query = sa.select(AdapterRow).where(AdapterRow.changed_epoch > since).order_by(AdapterRow.id)
    if since == 0:
        query = query.where(AdapterRow.deleted_at.is_(None))
    adapters = (await session.execute(query)).scalars().all()
    changed = sa.select(AdapterRow.id).where(AdapterRow.changed_epoch > since, AdapterRow.deleted_at.is_(None))
    versions: dict[uuid.UUID, list[sa.Row[Any]]] = defaultdict(list)
    aliases: dict[uuid.UUID, list[AliasRow]] = defaultdict(list)
    found = await session.execute(
        sa.select(*_VERSION_COLUMNS).where(VersionRow.adapter_id.in_(changed)).order_by(VersionRow.number)
    )
    for version in found:
        versions[version.adapter_id].append(version)
    for alias in (await session.execute(sa.select(AliasRow).where(AliasRow.adapter_id.in_(changed)))).scalars():
        aliases[alias.adapter_id].append(alias)
    return tuple(
        _show_adapter(adapter, versions[adapter.id], aliases[adapter.id], is_gated=is_gated) for adapter in adapters
    )


def _show_adapter(
    adapter: AdapterRow, versions: Sequence[sa.Row[Any]], aliases: Sequence[AliasRow], *, is_gated: bool
) -> AdapterName:
    set_aliases = [alias for alias in aliases if alias.targets]
    return AdapterName(
        adapter_id=str(adapter.id),
        tenant_id=adapter.tenant_id,
        tenant=adapter.tenant,
        name=adapter.name,
        base=adapter.base.name,
        is_default=adapter.is_default,
        deleted=adapter.deleted_at is not None,
        versions=tuple(_show_version(version, adapter.base.name, is_gated=is_gated) for version in versions),
        aliases={alias.name: read_targets(alias.targets) for alias in set_aliases},
        alias_ids={alias.name: str(alias.id) for alias in set_aliases},
        limits=read_limits(adapter.limits),
    )


def _show_version(version: sa.Row[Any], base: str, *, is_gated: bool) -> VersionName:
    return VersionName(
        number=version.number,
        digest=version.digest,
        state=version.state,
        base=base,
        kind=version.kind,
        rank=version.rank,
        quarantine=read_quarantine(version.state, version.quarantine),
        pool=version.pool,
        weights_digest=version.weights_digest if is_gated else None,
    )


def _show_base(base: BaseRow) -> BaseName:
    return BaseName(
        name=base.name,
        accepted_names=tuple(base.accepted_names),
        fingerprint=base.fingerprint,
        weights_digest=base.weights_digest,
        max_lora_rank=base.max_lora_rank,
        default_context=base.default_context,
    )
