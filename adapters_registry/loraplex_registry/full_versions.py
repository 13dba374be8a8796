"""Full fine-tunes as versions of an adapter: registered, put in place of what is live, taken back, withdrawn.

`FullVersions` is the only writer of versions of kind `full`. It decides nothing: an escalation allows each act, and is
somebody else's. Each act is one transaction and may be repeated, as whoever asks may have died before it noted the
answer. Their bytes are not the registry's: replicas of a pool serve them, and say which digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.adapters import version_state
from loraplex_registry.adapters.alias_row import set_targets
from loraplex_registry.adapters.lookup import find_adapter, find_alias, find_live, get_adapter, list_aliases
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.adapters.view import LIVE, read_targets, show_version
from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import AdapterRow, AliasHistoryRow, AliasRow, VersionRow
from loraplex_registry.errors import ConflictError, InvalidRequestError, NotFoundError, QuarantinedError
from loraplex_registry.events import record_event
from loraplex_registry.peft.report import build_report
from loraplex_registry.wire.adapter import Target, VersionView
from loraplex_registry.wire.digest import check_digest
from loraplex_registry.wire.full import Replaced
from loraplex_registry.wire.identity import Identity

_FULL_WEIGHT = 100
_GONE = ("retired", "purged")


@dataclass(frozen=True)
class Place:
    """Where a full fine-tune belongs: an adapter of a tenant, and the escalation that allows it."""

    tenant: TenantRef
    adapter: str
    escalation: str


class FullVersions:
    """Acts on the full fine-tune of one escalation at a time."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def register(self, place: Place, pool: str, digest: str, by: Identity) -> VersionView:
        """Give the adapter a version that `pool` serves, or find the one that the escalation has already.

        Raises:
            NotFoundError: There is no such adapter.
            InvalidRequestError: `digest` is none.
            ConflictError: The pool serves another full fine-tune, or the adapter has a version of that digest.
        """
        _check_digest(digest)

        async def work(change: Change) -> VersionView:
            adapter = await get_adapter(change.session, place.tenant, place.adapter)
            for version in await _list_own(change.session, place.escalation):
                if (version.pool, version.digest) == (pool, digest):
                    return await _show(change.session, version)
                # what an earlier try has left that nobody noted
                await _retire(change, version, by)
            await _check_free(change.session, pool)
            await _make_room(change, adapter, digest, by)
            return await _show(change.session, await _create(change, adapter, place, pool, digest, by))

        return await self._database.change(work)

    async def activate(self, place: Place, by: Identity) -> tuple[VersionView, Replaced]:
        """Point `live` to the full fine-tune alone, and return what it pointed to before.

        Raises:
            NotFoundError: There is no such adapter, or it has no full fine-tune under this escalation.
            QuarantinedError: The version is quarantined.
        """

        async def work(change: Change) -> tuple[VersionView, Replaced]:
            adapter = await get_adapter(change.session, place.tenant, place.adapter)
            version = await _get_own(change.session, place.escalation)
            if version.state == "quarantined":
                raise QuarantinedError(f"Version {version.number} is quarantined; an admin must release it first")
            alias = await find_alias(change.session, adapter.id, LIVE)
            whole = (Target(version.number, _FULL_WEIGHT),)
            live = read_targets(alias.targets) if alias is not None else ()
            if version.replaced is None:
                version.replaced = msgspec.to_builtins(Replaced(await _find_former(change.session, alias, whole)))
            if live != whole:
                await _move(change, adapter, live, whole, "set", by)
            await change.session.flush()
            return await _show(change.session, version), msgspec.convert(version.replaced, Replaced)

        return await self._database.change(work)

    async def revert(self, place: Place, by: Identity) -> None:
        """Point `live` back to what it pointed to; if somebody has moved it elsewhere since, it stays there."""

        async def work(change: Change) -> None:
            adapter = await find_adapter(change.session, place.tenant, place.adapter)
            for version in await _list_own(change.session, place.escalation):
                await _put_back(change, adapter, version, by)

        await self._database.change(work)

    async def withdraw(self, place: Place, by: Identity) -> None:
        """Put back what was live, and retire the full fine-tune: nobody can call it any more.

        Raises:
            ConflictError: Another alias, or `live` as somebody else has set it, points to it; nothing has changed.
        """

        async def work(change: Change) -> None:
            adapter = await find_adapter(change.session, place.tenant, place.adapter)
            for version in await _list_own(change.session, place.escalation):
                await _put_back(change, adapter, version, by)
                await _retire(change, version, by)

        await self._database.change(work)


def _check_digest(digest: str) -> None:
    try:
        check_digest(digest)
    except ValueError as error:
        raise InvalidRequestError(str(error), param="digest") from error


async def _list_own(session: AsyncSession, escalation: str) -> Sequence[VersionRow]:
    query = sa.select(VersionRow).where(VersionRow.escalation == escalation, VersionRow.state.not_in(_GONE))
    return (await session.execute(query)).scalars().all()


async def _get_own(session: AsyncSession, escalation: str) -> VersionRow:
    found = await _list_own(session, escalation)
    if not found:
        raise NotFoundError("This escalation has no full fine-tune that is served", param="escalation")
    return found[0]


async def _check_free(session: AsyncSession, pool: str) -> None:
    """One pool serves one full fine-tune: its replicas hold the weights of one model."""
    query = (
        sa.select(VersionRow)
        .join(AdapterRow, AdapterRow.id == VersionRow.adapter_id)
        .where(VersionRow.pool == pool, VersionRow.state.not_in(_GONE), AdapterRow.deleted_at.is_(None))
        .limit(1)
    )
    version = (await session.execute(query)).scalar_one_or_none()
    if version is not None:
        name = f"{version.adapter.tenant}/{version.adapter.name}@{version.number}"
        raise ConflictError(f"The pool {pool} serves {name}; close its escalation first, or name another", param="pool")


async def _make_room(change: Change, adapter: AdapterRow, digest: str, by: Identity) -> None:
    """An adapter has each content once: what an earlier escalation has left of this one gives way."""
    query = sa.select(VersionRow).where(
        VersionRow.adapter_id == adapter.id, VersionRow.digest == digest, VersionRow.state != "purged"
    )
    version = (await change.session.execute(query)).scalar_one_or_none()
    if version is None:
        return
    if version.kind != "full" or version.state != "retired":
        raise ConflictError(f"The same content is version {version.number} already", param="digest")
    version_state.purge(change, version, by)
    await change.session.flush()


async def _create(
    change: Change, adapter: AdapterRow, place: Place, pool: str, digest: str, by: Identity
) -> VersionRow:
    number, adapter.next_number = adapter.next_number, adapter.next_number + 1
    adapter.changed_epoch = change.epoch
    version = VersionRow(
        adapter_id=adapter.id,
        adapter=adapter,
        number=number,
        kind="full",
        digest=digest,
        state="ready",
        pool=pool,
        escalation=place.escalation,
        rank=0,
        target_modules=[],
        num_parameters=0,
        size_bytes=0,
        files=[],
        report=msgspec.to_builtins(build_report([])),
        created_by=by.actor,
    )
    change.session.add(version)
    await change.session.flush()
    record_event(
        change.session,
        by,
        "adapter.version_created",
        f"{adapter.tenant}/{adapter.name}@{version.number}",
        tenant_id=adapter.tenant_id,
        tenant=adapter.tenant,
        after={"state": version.state, "digest": digest},
        details={"digest": digest, "kind": "full", "pool": pool, "escalation": place.escalation},
    )
    return version


async def _find_former(session: AsyncSession, alias: AliasRow | None, whole: tuple[Target, ...]) -> tuple[Target, ...]:
    """What `live` points to, or, where somebody has moved it to the full fine-tune by hand, last pointed to before."""
    if alias is None:
        return ()
    query = (
        sa.select(AliasHistoryRow.targets)
        .where(AliasHistoryRow.alias_id == alias.id)
        .order_by(AliasHistoryRow.revision.desc())
    )
    past = (read_targets(targets) for targets in (await session.execute(query)).scalars())
    return next((targets for targets in past if targets != whole), ())


async def _put_back(change: Change, adapter: AdapterRow | None, version: VersionRow, by: Identity) -> None:
    if version.replaced is None:
        return
    former = msgspec.convert(version.replaced, Replaced).targets
    version.replaced = None
    if adapter is None or adapter.id != version.adapter_id:
        # the adapter was deleted, and its aliases with it
        return
    live = await find_live(change.session, adapter.id)
    if any(target.version == version.number for target in live):
        await _move(change, adapter, live, former, "rollback" if former else "delete", by)
    await change.session.flush()


async def _retire(change: Change, version: VersionRow, by: Identity) -> None:
    for alias in await list_aliases(change.session, [version.adapter_id]):
        if any(target.version == version.number for target in read_targets(alias.targets)):
            raise ConflictError(
                f"The alias {alias.name} targets version {version.number}, the full fine-tune; point it elsewhere first"
            )
    version_state.retire(change, version, by)
    await change.session.flush()


async def _move(
    change: Change,
    adapter: AdapterRow,
    before: Sequence[Target],
    after: Sequence[Target],
    action: str,
    by: Identity,
) -> None:
    alias = await set_targets(change, adapter, LIVE, after, action, by.actor)
    record_event(
        change.session,
        by,
        f"alias.{action}",
        f"{adapter.tenant}/{adapter.name}@{LIVE}",
        tenant_id=adapter.tenant_id,
        tenant=adapter.tenant,
        before={"revision": alias.revision - 1, "targets": msgspec.to_builtins(before)} if before else None,
        after={"revision": alias.revision, "targets": alias.targets} if after else None,
    )


async def _show(session: AsyncSession, version: VersionRow) -> VersionView:
    return show_version(version, await find_live(session, version.adapter_id))
