"""Aliases as clients move them: compare-and-set against the revision that they have seen, rollback, history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.adapters.alias_row import set_targets
from loraplex_registry.adapters.lookup import find_alias, find_version, get_adapter, list_aliases
from loraplex_registry.adapters.page import Page, PageOrder, build_page, parse_number
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.adapters.view import (
    AliasChangeView,
    AliasView,
    read_targets,
    show_alias,
    show_alias_change,
)
from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import AdapterRow, AliasHistoryRow, AliasRow
from loraplex_registry.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PreconditionFailedError,
    PreconditionRequiredError,
)
from loraplex_registry.events import record_event
from loraplex_registry.wire.adapter import Target
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.naming import check_alias_name

_MAX_TARGETS = 8


@dataclass(frozen=True)
class Precondition:
    """What a client has seen: revisions from If-Match (`any_revision` for `*`), or that nothing is there."""

    revisions: frozenset[int] | None = None
    any_revision: bool = False
    must_be_absent: bool = False

    @property
    def is_given(self) -> bool:
        """Whether the client said anything."""
        return self.revisions is not None or self.any_revision or self.must_be_absent

    def check(self, alias: AliasRow | None) -> None:
        """Return if `alias` (None where it is not set) is what the client has seen.

        Raises:
            PreconditionFailedError: It is not; carries what is there.
        """
        if self.is_given and not self._holds(alias):
            raise PreconditionFailedError(
                current=show_alias(alias) if alias else None, revision=alias.revision if alias else None
            )

    def _holds(self, alias: AliasRow | None) -> bool:
        if self.must_be_absent or alias is None:
            return self.must_be_absent and alias is None
        return self.any_revision or alias.revision in (self.revisions or ())


class Aliases:
    """Moves aliases; every move is one transaction with its history entry and its event."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self, tenant: TenantRef, adapter: str) -> list[AliasView]:
        """Return the adapter's aliases in order of name."""
        async with self._database.read() as session:
            row = await get_adapter(session, tenant, adapter)
            return [show_alias(alias) for alias in await list_aliases(session, [row.id])]

    async def get(self, tenant: TenantRef, adapter: str, name: str) -> AliasView:
        """Return one alias.

        Raises:
            NotFoundError: The adapter has none of that name.
        """
        async with self._database.read() as session:
            row = await get_adapter(session, tenant, adapter)
            return show_alias(await _get_set(session, row, name))

    async def put(
        self, tenant: TenantRef, adapter: str, name: str, targets: Sequence[Target], seen: Precondition, by: Identity
    ) -> tuple[AliasView, bool]:
        """Point an alias to `targets` if it is still what the client has seen.

        Returns:
            The alias, and whether it was not set before.

        Raises:
            PreconditionRequiredError: The client did not say what it has seen.
            PreconditionFailedError: Someone else moved it meanwhile.
            InvalidRequestError: The targets are not 1 to 8 versions whose weights sum to 100.
            NotFoundError: There is no such adapter or version.
            ConflictError: A version is not ready.
        """
        check_alias_name(name)
        _check_weights(targets)
        if not seen.is_given:
            raise PreconditionRequiredError

        async def work(change: Change) -> tuple[AliasView, bool]:
            row = await get_adapter(change.session, tenant, adapter)
            before = await _find_set(change.session, row, name)
            seen.check(before)
            await _check_ready(change.session, row, targets)
            return show_alias(await _move(change, row, name, targets, "set", by)), before is None

        return await self._database.change(work)

    async def roll_back(
        self, tenant: TenantRef, adapter: str, name: str, seen: Precondition, by: Identity
    ) -> AliasView:
        """Point an alias to where its previous history entry pointed, as a new entry.

        Raises:
            NotFoundError: There is no such alias.
            ConflictError: There is no previous entry, or one of its versions is no longer ready.
            PreconditionFailedError: Someone else moved it meanwhile.
        """

        async def work(change: Change) -> AliasView:
            row = await get_adapter(change.session, tenant, adapter)
            alias = await _get_set(change.session, row, name)
            seen.check(alias)
            targets = await _read_previous(change.session, alias)
            if not targets:
                raise ConflictError(f"The alias {name} has nothing to go back to")
            await _check_ready(change.session, row, targets)
            return show_alias(await _move(change, row, name, targets, "rollback", by))

        return await self._database.change(work)

    async def delete(self, tenant: TenantRef, adapter: str, name: str, seen: Precondition, by: Identity) -> None:
        """Delete an alias; its history stays and its revisions continue.

        Raises:
            NotFoundError: There is no such alias.
            PreconditionFailedError: Someone else moved it meanwhile.
        """

        async def work(change: Change) -> None:
            row = await get_adapter(change.session, tenant, adapter)
            seen.check(await _get_set(change.session, row, name))
            await _move(change, row, name, (), "delete", by)

        await self._database.change(work)

    async def history(self, tenant: TenantRef, adapter: str, name: str, order: PageOrder) -> Page[AliasChangeView]:
        """Return the revisions of an alias, newest first, also of a deleted one.

        Raises:
            NotFoundError: There never was such an alias.
        """
        async with self._database.read() as session:
            row = await get_adapter(session, tenant, adapter)
            alias = await find_alias(session, row.id, name)
            if alias is None:
                raise NotFoundError(f"{adapter} has no alias {name}", param="alias")
            query = sa.select(AliasHistoryRow).where(AliasHistoryRow.alias_id == alias.id)
            after = order.after(parse_number)
            if after is not None:
                query = query.where(AliasHistoryRow.revision < after)
            query = query.order_by(AliasHistoryRow.revision.desc()).limit(order.limit + 1)
            changes = [show_alias_change(change) for change in (await session.execute(query)).scalars()]
        return build_page(changes, order.limit, lambda change: change.revision)


def _check_weights(targets: Sequence[Target]) -> None:
    if not 1 <= len(targets) <= _MAX_TARGETS:
        raise InvalidRequestError(f"An alias has 1 to {_MAX_TARGETS} targets", param="targets")
    if len({target.version for target in targets}) < len(targets):
        raise InvalidRequestError("Each version may be a target once", param="targets")
    if any(target.weight < 1 for target in targets) or sum(target.weight for target in targets) != 100:
        raise InvalidRequestError("weights are integers from 1 on that sum to 100", param="targets")


async def _check_ready(session: AsyncSession, adapter: AdapterRow, targets: Sequence[Target]) -> None:
    for target in targets:
        version = await find_version(session, adapter.id, target.version)
        if version is None:
            raise NotFoundError(f"{adapter.tenant}/{adapter.name} has no version {target.version}", param="targets")
        if version.state != "ready":
            raise ConflictError(f"Version {target.version} is {version.state}, not ready", param="targets")


async def _find_set(session: AsyncSession, adapter: AdapterRow, name: str) -> AliasRow | None:
    alias = await find_alias(session, adapter.id, name)
    return alias if alias is not None and alias.targets else None


async def _get_set(session: AsyncSession, adapter: AdapterRow, name: str) -> AliasRow:
    alias = await _find_set(session, adapter, name)
    if alias is None:
        raise NotFoundError(f"{adapter.tenant}/{adapter.name} has no alias {name}", param="alias")
    return alias


async def _read_previous(session: AsyncSession, alias: AliasRow) -> tuple[Target, ...]:
    found = await session.execute(
        sa.select(AliasHistoryRow.targets).where(
            AliasHistoryRow.alias_id == alias.id, AliasHistoryRow.revision == alias.revision - 1
        )
    )
    return read_targets(found.scalar_one_or_none() or [])


async def _move(
    change: Change, adapter: AdapterRow, name: str, targets: Sequence[Target], action: str, by: Identity
) -> AliasRow:
    alias = await set_targets(change, adapter, name, targets, action, by.actor)
    record_event(
        change.session,
        by,
        f"alias.{action}",
        f"{adapter.tenant}/{adapter.name}@{name}",
        tenant_id=adapter.tenant_id,
        tenant=adapter.tenant,
        details={"revision": alias.revision, "targets": alias.targets},
    )
    return alias
