"""Finds rows by the names that clients use; changes nothing."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.adapters.page import PageOrder, parse_number
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.adapters.view import LIVE, read_targets
from loraplex_registry.db.column import MAX_INTEGER
from loraplex_registry.db.model import AdapterRow, AliasRow, BaseRow, VersionRow
from loraplex_registry.errors import NotFoundError
from loraplex_registry.wire.adapter import Target
from loraplex_registry.wire.naming import is_alias_name, is_name


async def find_adapter(session: AsyncSession, tenant: TenantRef, name: str) -> AdapterRow | None:
    """Return the tenant's adapter `name`, None if there is none or it is deleted."""
    if not is_name(name):
        # may hold what a database refuses to compare
        return None
    found = await session.execute(
        sa.select(AdapterRow).where(
            AdapterRow.tenant_id == tenant.id, AdapterRow.name == name, AdapterRow.deleted_at.is_(None)
        )
    )
    return found.scalar_one_or_none()


async def get_adapter(session: AsyncSession, tenant: TenantRef, name: str) -> AdapterRow:
    """Return the tenant's adapter `name`.

    Raises:
        NotFoundError: There is none.
    """
    adapter = await find_adapter(session, tenant, name)
    if adapter is None:
        raise NotFoundError(f"{tenant.name} has no adapter {name}", param="adapter")
    return adapter


async def find_version(session: AsyncSession, adapter_id: uuid.UUID, number: int) -> VersionRow | None:
    """Return version `number` of an adapter."""
    if not 1 <= number <= MAX_INTEGER:
        return None
    found = await session.execute(
        sa.select(VersionRow).where(VersionRow.adapter_id == adapter_id, VersionRow.number == number)
    )
    return found.scalar_one_or_none()


async def get_version(session: AsyncSession, tenant: TenantRef, name: str, number: int) -> VersionRow:
    """Return version `number` of the tenant's adapter `name`.

    Raises:
        NotFoundError: There is none.
    """
    adapter = await get_adapter(session, tenant, name)
    version = await find_version(session, adapter.id, number)
    if version is None:
        raise NotFoundError(f"{tenant.name}/{name} has no version {number}", param="version")
    return version


async def find_alias(session: AsyncSession, adapter_id: uuid.UUID, name: str) -> AliasRow | None:
    """Return the row of an alias, also of a deleted one."""
    if not is_alias_name(name):
        return None
    found = await session.execute(sa.select(AliasRow).where(AliasRow.adapter_id == adapter_id, AliasRow.name == name))
    return found.scalar_one_or_none()


async def find_live(session: AsyncSession, adapter_id: uuid.UUID) -> tuple[Target, ...]:
    """Return what the alias `live` targets, nothing if it is not set."""
    alias = await find_alias(session, adapter_id, LIVE)
    return read_targets(alias.targets) if alias else ()


async def list_aliases(session: AsyncSession, adapter_ids: Sequence[uuid.UUID]) -> Sequence[AliasRow]:
    """Return the aliases that are set, in order of name."""
    found = await session.execute(
        sa.select(AliasRow).where(AliasRow.adapter_id.in_(adapter_ids)).order_by(AliasRow.name)
    )
    return [alias for alias in found.scalars() if alias.targets]


async def list_states(session: AsyncSession, adapter_ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, dict[int, str]]:
    """Return the states of each adapter's versions by number."""
    found = await session.execute(
        sa.select(VersionRow.adapter_id, VersionRow.number, VersionRow.state).where(
            VersionRow.adapter_id.in_(adapter_ids)
        )
    )
    states: dict[uuid.UUID, dict[int, str]] = {adapter_id: {} for adapter_id in adapter_ids}
    for adapter_id, number, state in found:
        states[adapter_id][number] = state
    return states


async def list_adapters(session: AsyncSession, tenant: TenantRef, order: PageOrder) -> Sequence[AdapterRow]:
    """Return one more than a page of the tenant's adapters, newest first."""
    query = sa.select(AdapterRow).where(AdapterRow.tenant_id == tenant.id, AdapterRow.deleted_at.is_(None))
    after = order.after(uuid.UUID)
    if after is not None:
        query = query.where(AdapterRow.id < after)
    return (await session.execute(query.order_by(AdapterRow.id.desc()).limit(order.limit + 1))).scalars().all()


async def list_versions(session: AsyncSession, adapter_id: uuid.UUID, order: PageOrder) -> Sequence[VersionRow]:
    """Return one more than a page of an adapter's versions, newest first."""
    query = sa.select(VersionRow).where(VersionRow.adapter_id == adapter_id)
    after = order.after(parse_number)
    if after is not None:
        query = query.where(VersionRow.number < after)
    return (await session.execute(query.order_by(VersionRow.number.desc()).limit(order.limit + 1))).scalars().all()


async def list_bases(session: AsyncSession) -> Sequence[BaseRow]:
    """Return all bases, oldest first."""
    return (await session.execute(sa.select(BaseRow).order_by(BaseRow.id))).scalars().all()
