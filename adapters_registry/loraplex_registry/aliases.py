"""Aliases as clients move them: compare-and-set against the revision that they have seen, rollback, history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.adapters.alias_row import set_targets
from loraplex_registry.adapters.lookup import find_alias, find_version, get_adapter, list_aliases
from loraplex_registry.adapters.page import Page, PageOrder, build_page, parse_number
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.adapters.view import LIVE, read_targets, show_alias, show_alias_change
from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import AdapterRow, AliasHistoryRow, AliasRow, VersionRow
from loraplex_registry.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PreconditionFailedError,
    PreconditionRequiredError,
)
from loraplex_registry.events import record_event
from loraplex_registry.wire.adapter import AliasChangeView, AliasView, Target
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.naming import check_alias_name

_MAX_TARGETS = 8
_MAX_BROKEN = 100
_SERVABLE = ("validating", "ready", "quarantined")
"""States of versions that answer, or say why they do not; what an alias leads to is one of them."""

_WITHHELD = "withheld"
_STATE_TO_REMEDY = {
    "validating": "wait until it is ready",
    "quarantined": "an admin must release it first",
    "retired": "restore it first, or name another",
    "purged": "its bytes are gone; name another",
}


@dataclass(frozen=True)
class BrokenAlias:
    """An alias that leads to what is not there."""

    tenant: TenantRef
    adapter: str
    alias: str
    targets: tuple[Target, ...]


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
            ConflictError: A version is not ready, or `live` would lead to a full fine-tune that is not active.
        """
        check_alias_name(name)
        _check_weights(targets)
        if not seen.is_given:
            raise PreconditionRequiredError

        async def work(change: Change) -> tuple[AliasView, bool]:
            row = await get_adapter(change.session, tenant, adapter)
            before = await _find_set(change.session, row, name)
            seen.check(before)
            await _check_ready(change.session, row, name, targets)
            return show_alias(await _move(change, row, name, targets, "set", by)), before is None

        return await self._database.change(work)

    async def roll_back(
        self, tenant: TenantRef, adapter: str, name: str, seen: Precondition, by: Identity
    ) -> AliasView:
        """Point an alias to where it last pointed before, as a new entry.

        What an escalation had put there for a time is passed over, unless it stands in for the adapter now.

        Raises:
            NotFoundError: There is no such alias.
            ConflictError: It never pointed elsewhere, or one of the versions there is no longer ready.
            PreconditionFailedError: Someone else moved it meanwhile.
        """

        async def work(change: Change) -> AliasView:
            row = await get_adapter(change.session, tenant, adapter)
            alias = await _get_set(change.session, row, name)
            seen.check(alias)
            targets = await _find_previous(change.session, alias, await _read_states(change.session, row, name))
            if not targets:
                raise ConflictError(f"The alias {name} has nothing to go back to; point it to a version by its number")
            await _check_ready(change.session, row, name, targets)
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

    async def find_broken(self) -> Sequence[BrokenAlias]:
        """Return the aliases that lead to versions which are retired, purged or were never there.

        The database lets none come about; a backup that was put back in part, or a hand, may.
        """
        async with self._database.read() as session:
            is_sqlite = session.get_bind().dialect.name == "sqlite"
            rows = (await session.execute(_select_broken(is_sqlite=is_sqlite).limit(_MAX_BROKEN))).all()
        return [
            BrokenAlias(TenantRef(row.tenant_id, row.tenant), row.adapter, row.alias, read_targets(row.targets))
            for row in rows
        ]

    async def mend(self, tenant: TenantRef, adapter: str, name: str, by: Identity) -> AliasView | None:
        """Point a broken alias to where it last pointed that is there still, as a rollback; without that, delete it.

        One that is not broken stays as it is.

        Returns:
            The alias as it is then, None if it is deleted.

        Raises:
            NotFoundError: There is no such adapter or alias.
        """

        async def work(change: Change) -> AliasView | None:
            row = await get_adapter(change.session, tenant, adapter)
            alias = await _get_set(change.session, row, name)
            states = await _read_states(change.session, row, name)
            if all(states.get(target.version) in _SERVABLE for target in read_targets(alias.targets)):
                return show_alias(alias)
            targets = await _find_last_ready(change.session, alias, states)
            moved = await _move(change, row, name, targets, "rollback" if targets else "delete", by)
            return show_alias(moved) if targets else None

        return await self._database.change(work)

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


async def _check_ready(session: AsyncSession, adapter: AdapterRow, alias: str, targets: Sequence[Target]) -> None:
    for target in targets:
        version = await find_version(session, adapter.id, target.version)
        if version is None:
            raise NotFoundError(f"{adapter.tenant}/{adapter.name} has no version {target.version}", param="targets")
        if version.state != "ready":
            raise ConflictError(_explain_state(version), param="targets")
        if _is_withheld(alias, version.kind, version.replaced):
            raise ConflictError(
                f"Version {target.version} is a full fine-tune that is not active; an administrator makes it live by "
                "`loraplex escalations activate`, other aliases may lead to it before",
                param="targets",
            )


def _explain_state(version: VersionRow) -> str:
    if _is_closed(version.kind, version.state):
        return (
            f"Version {version.number} was a full fine-tune, and its escalation is closed; name another, or open a new "
            "escalation"
        )
    return f"Version {version.number} is {version.state}, not ready; {_STATE_TO_REMEDY[version.state]}"


def _is_withheld(alias: str, kind: str, replaced: object) -> bool:
    """Whether `live` may not lead there: what takes the adapters' place is an administrator's to say."""
    return alias == LIVE and kind == "full" and replaced is None


def _is_closed(kind: str, state: str) -> bool:
    """Whether it is a full fine-tune whose escalation has ended: nobody can bring it back."""
    return kind == "full" and state in ("retired", "purged")


async def _find_set(session: AsyncSession, adapter: AdapterRow, name: str) -> AliasRow | None:
    alias = await find_alias(session, adapter.id, name)
    return alias if alias is not None and alias.targets else None


async def _get_set(session: AsyncSession, adapter: AdapterRow, name: str) -> AliasRow:
    alias = await _find_set(session, adapter, name)
    if alias is None:
        raise NotFoundError(f"{adapter.tenant}/{adapter.name} has no alias {name}", param="alias")
    return alias


def _select_broken(*, is_sqlite: bool) -> sa.Select[str, str, str, str, list[Any]]:
    version_number: sa.ColumnElement[int]
    if is_sqlite:
        target = sa.func.json_each(AliasRow.targets).table_valued("value", name="target")
        version_number = sa.func.json_extract(target.c.value, "$.version")
    else:
        target = sa.func.jsonb_array_elements(AliasRow.targets).table_valued("value").render_derived(name="target")
        version_number = sa.cast(target.c.value.op("->>")("version"), sa.Integer)
    is_there = (
        sa.exists()
        .where(
            VersionRow.adapter_id == AliasRow.adapter_id,
            VersionRow.number == version_number,
            VersionRow.state.in_(_SERVABLE),
        )
        .correlate_except(VersionRow)
    )
    return (
        sa.select(
            AdapterRow.tenant_id,
            AdapterRow.tenant,
            AdapterRow.name.label("adapter"),
            AliasRow.name.label("alias"),
            AliasRow.targets,
        )
        .join(AdapterRow, AdapterRow.id == AliasRow.adapter_id)
        .where(
            AdapterRow.deleted_at.is_(None),
            sa.exists(sa.select(1).select_from(target).where(~is_there).correlate_except(target)),
        )
        .order_by(AliasRow.id)
    )


async def _read_states(session: AsyncSession, adapter: AdapterRow, alias: str) -> dict[int, str]:
    columns = (VersionRow.number, VersionRow.state, VersionRow.kind, VersionRow.replaced)
    rows = await session.execute(sa.select(*columns).where(VersionRow.adapter_id == adapter.id))
    return {
        row.number: _WITHHELD
        if _is_withheld(alias, row.kind, row.replaced) or _is_closed(row.kind, row.state)
        else row.state
        for row in rows
    }


async def _find_last_ready(session: AsyncSession, alias: AliasRow, states: Mapping[int, str]) -> tuple[Target, ...]:
    """What the newest entry of an alias's history targets of which every version is ready, nothing if none is so."""
    entries = sa.select(AliasHistoryRow.targets).where(AliasHistoryRow.alias_id == alias.id)
    for found in (await session.execute(entries.order_by(AliasHistoryRow.revision.desc()))).scalars():
        targets = read_targets(found)
        if targets and all(states.get(target.version) == "ready" for target in targets):
            return targets
    return ()


async def _find_previous(session: AsyncSession, alias: AliasRow, states: Mapping[int, str]) -> tuple[Target, ...]:
    """What an alias last led to before what it leads to now, without what it may not lead to any more.

    Nothing if nothing was there, as before its first entry and after it was deleted.
    """
    entries = sa.select(AliasHistoryRow.targets).where(
        AliasHistoryRow.alias_id == alias.id, AliasHistoryRow.revision < alias.revision
    )
    present = read_targets(alias.targets)
    for found in (await session.execute(entries.order_by(AliasHistoryRow.revision.desc()))).scalars():
        targets = read_targets(found)
        is_withheld = any(states.get(target.version) == _WITHHELD for target in targets)
        if targets != present and not is_withheld:
            return targets
    return ()


async def _move(
    change: Change, adapter: AdapterRow, name: str, targets: Sequence[Target], action: str, by: Identity
) -> AliasRow:
    found = await find_alias(change.session, adapter.id, name)
    before = {"revision": found.revision, "targets": found.targets} if found is not None and found.targets else None
    alias = await set_targets(change, adapter, name, targets, action, by.actor)
    record_event(
        change.session,
        by,
        f"alias.{action}",
        f"{adapter.tenant}/{adapter.name}@{name}",
        tenant_id=adapter.tenant_id,
        tenant=adapter.tenant,
        before=before,
        after={"revision": alias.revision, "targets": alias.targets} if alias.targets else None,
        details={"revision": alias.revision, "targets": alias.targets},
    )
    return alias
