"""What happens to adapters and versions after upload: retire, restore, quarantine, release, default, delete."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime

import msgspec
import sqlalchemy as sa

from loraplex_registry.adapters.alias_row import make_default, set_targets
from loraplex_registry.adapters.lookup import (
    find_live,
    get_adapter,
    get_version,
    list_aliases,
    list_states,
)
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.adapters.view import AdapterView, read_targets, show_adapter, show_time, show_version
from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import AdapterRow, VersionRow
from loraplex_registry.errors import ConflictError, QuarantinedError, RetiredError
from loraplex_registry.events import record_event
from loraplex_registry.wire.adapter import Quarantine, QuarantineReason, VersionView
from loraplex_registry.wire.identity import Identity


class Lifecycle:
    """The only writer of version states after upload, and of deleted adapters."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.forget_failure: Callable[[str], Awaitable[None]] = _forget_nothing
        """Makes every engine that failed to load a digest, or has quarantined it, forget so."""
        self.forget: Callable[[str, Iterable[str]], None] = _forget_no_content
        """Begins to make engines give back what they hold of digests of a base, unless something else is called so."""

    async def retire(self, tenant: TenantRef, name: str, number: int, by: Identity) -> VersionView:
        """Retire a version; one that is retired already stays so.

        Raises:
            NotFoundError: There is no such version.
            ConflictError: An alias targets it.
            QuarantinedError: It is quarantined.
            RetiredError: It is purged.
        """

        async def retire(change: Change, version: VersionRow) -> None:
            if version.state != "retired":
                await _check_untargeted(change, version)
                version.state, version.retired_at = "retired", datetime.now(UTC)
                _mark(change, version, by, "adapter.version_retired")

        view = await self._change_version(tenant, name, number, retire)
        self.forget(view.base_model, (view.digest,))
        return view

    async def restore(self, tenant: TenantRef, name: str, number: int, by: Identity) -> VersionView:
        """Make a retired version ready again.

        Raises:
            NotFoundError: There is no such version.
            ConflictError: It is not retired.
            QuarantinedError: It is quarantined.
            RetiredError: It is purged.
        """

        async def restore(change: Change, version: VersionRow) -> None:
            if version.state != "retired":
                raise ConflictError(f"Version {number} is {version.state}; only a retired version can be restored")
            version.state, version.retired_at = "ready", None
            _mark(change, version, by, "adapter.version_restored")

        return await self._change_version(tenant, name, number, restore)

    async def quarantine(self, tenant: TenantRef, name: str, number: int, by: Identity) -> VersionView:
        """Take a ready version out of service; one that is quarantined already stays so, for its own reason.

        Raises:
            NotFoundError: There is no such version.
            ConflictError: It is retired.
            RetiredError: It is purged.
        """

        async def quarantine(change: Change, version: VersionRow) -> None:
            if version.state == "retired":
                raise ConflictError(f"Version {number} is retired; nobody can call it")
            if version.state != "quarantined":
                _quarantine(change, version, by, "by_admin", "An administrator took it out of service.")

        return await self._change_version(tenant, name, number, quarantine, allows_quarantined=True)

    async def quarantine_failed(self, digest: str, message: str, by: Identity) -> int:
        """Quarantine every version of a digest whose bytes no engine can load, and return how many there were.

        Args:
            digest: The content.
            message: One sentence on the cause.
            by: The platform itself.
        """

        async def work(change: Change) -> int:
            query = sa.select(VersionRow).where(
                VersionRow.digest == digest, VersionRow.state.in_(("validating", "ready"))
            )
            versions = (await change.session.execute(query)).scalars().all()
            for version in versions:
                _quarantine(change, version, by, "load_failed", message)
            return len(versions)

        return await self._database.change(work)

    async def release(self, tenant: TenantRef, name: str, number: int, by: Identity) -> VersionView:
        """Make a quarantined version ready again, after the engines have forgotten what they had against it.

        A ready version stays so, and the engines forget: what one of them has quarantined for itself ends by this too.

        Raises:
            NotFoundError: There is no such version.
            ConflictError: It is retired.
            RetiredError: It is purged.
        """

        async def release(change: Change, version: VersionRow) -> None:
            if version.state == "retired":
                raise ConflictError(f"Version {number} is retired; restore it instead")
            if version.state == "quarantined":
                version.state, version.quarantine = "ready", None
                _mark(change, version, by, "adapter.version_released")

        async with self._database.read() as session:
            version = await get_version(session, tenant, name, number)
        if version.state in ("ready", "quarantined"):
            await self.forget_failure(version.digest)
        return await self._change_version(tenant, name, number, release, allows_quarantined=True)

    async def make_default(self, tenant: TenantRef, name: str, by: Identity) -> AdapterView:
        """Let the tenant's bare name mean this adapter.

        Raises:
            NotFoundError: There is no such adapter.
        """

        async def work(change: Change) -> AdapterView:
            adapter = await get_adapter(change.session, tenant, name)
            await make_default(change, adapter)
            _record(change, adapter, by, "adapter.made_default")
            states = await list_states(change.session, [adapter.id])
            return show_adapter(adapter, states[adapter.id], await list_aliases(change.session, [adapter.id]))

        return await self._database.change(work)

    async def delete(self, tenant: TenantRef, name: str, by: Identity) -> None:
        """Delete an adapter: its name is free at once, its numbers continue if the name comes again.

        Raises:
            NotFoundError: There is no such adapter.
        """

        async def work(change: Change) -> tuple[str, set[str]]:
            adapter = await get_adapter(change.session, tenant, name)
            return adapter.base.name, await _delete(change, adapter, by)

        self.forget(*await self._database.change(work))

    async def delete_all(self, tenant: TenantRef, by: Identity) -> int:
        """Delete all adapters of a tenant and return how many there were."""

        async def work(change: Change) -> list[tuple[str, set[str]]]:
            adapters = await _list_all(change, tenant)
            return [(adapter.base.name, await _delete(change, adapter, by)) for adapter in adapters]

        deleted = await self._database.change(work)
        for base, digests in deleted:
            self.forget(base, digests)
        return len(deleted)

    async def count(self, tenant: TenantRef) -> int:
        """Return how many adapters a tenant has."""
        async with self._database.read() as session:
            found = await session.execute(
                sa.select(sa.func.count())
                .select_from(AdapterRow)
                .where(AdapterRow.tenant_id == tenant.id, AdapterRow.deleted_at.is_(None))
            )
            return found.scalar_one()

    async def _change_version(
        self,
        tenant: TenantRef,
        name: str,
        number: int,
        apply: Callable[[Change, VersionRow], Awaitable[None]],
        *,
        allows_quarantined: bool = False,
    ) -> VersionView:
        """Apply a change to a version that is not gone, and return how it is then."""

        async def work(change: Change) -> VersionView:
            version = await get_version(change.session, tenant, name, number)
            _check_not_gone(version, allows_quarantined=allows_quarantined)
            await apply(change, version)
            return show_version(version, await find_live(change.session, version.adapter_id))

        return await self._database.change(work)


async def _forget_nothing(digest: str) -> None:
    """A registry without a fleet knows no engines."""


def _forget_no_content(base: str, digests: Iterable[str]) -> None:
    """A registry without a fleet knows no engines."""


def _quarantine(change: Change, version: VersionRow, by: Identity, reason: QuarantineReason, message: str) -> None:
    found = Quarantine(reason=reason, message=message, since=show_time(datetime.now(UTC)))
    version.state, version.quarantine = "quarantined", msgspec.to_builtins(found)
    _mark(change, version, by, "adapter.version_quarantined", reason=reason, message=message)


def _check_not_gone(version: VersionRow, *, allows_quarantined: bool) -> None:
    if version.state == "quarantined" and not allows_quarantined:
        raise QuarantinedError(f"Version {version.number} is quarantined; an admin must release it first")
    if version.state == "purged":
        raise RetiredError(f"Version {version.number} is purged: its bytes are gone; upload it again")


async def _check_untargeted(change: Change, version: VersionRow) -> None:
    for alias in await list_aliases(change.session, [version.adapter_id]):
        if any(target.version == version.number for target in read_targets(alias.targets)):
            raise ConflictError(f"The alias {alias.name} targets version {version.number}; point it elsewhere first")


async def _list_all(change: Change, tenant: TenantRef) -> Sequence[AdapterRow]:
    query = sa.select(AdapterRow).where(AdapterRow.tenant_id == tenant.id, AdapterRow.deleted_at.is_(None))
    return (await change.session.execute(query)).scalars().all()


async def _delete(change: Change, adapter: AdapterRow, by: Identity) -> set[str]:
    """Delete an adapter and return the digests of its versions that could be called until now."""
    gone = sa.select(VersionRow.digest).where(
        VersionRow.adapter_id == adapter.id, VersionRow.state.not_in(("retired", "purged"))
    )
    digests = set((await change.session.execute(gone)).scalars())
    at = datetime.now(UTC)
    for alias in await list_aliases(change.session, [adapter.id]):
        await set_targets(change, adapter, alias.name, (), "delete", by.actor)
    await change.session.execute(
        sa.update(VersionRow)
        .where(VersionRow.adapter_id == adapter.id, VersionRow.state.in_(("validating", "ready")))
        .values(state="retired", retired_at=at)
    )
    adapter.deleted_at, adapter.is_default, adapter.changed_epoch = at, False, change.epoch
    _record(change, adapter, by, "adapter.deleted")
    await change.session.flush()
    return digests


def _mark(change: Change, version: VersionRow, by: Identity, action: str, **details: str) -> None:
    version.adapter.changed_epoch = change.epoch
    record_event(
        change.session,
        by,
        action,
        f"{version.adapter.tenant}/{version.adapter.name}@{version.number}",
        tenant_id=version.adapter.tenant_id,
        tenant=version.adapter.tenant,
        details={"digest": version.digest, **details},
    )


def _record(change: Change, adapter: AdapterRow, by: Identity, action: str) -> None:
    record_event(
        change.session,
        by,
        action,
        f"{adapter.tenant}/{adapter.name}",
        tenant_id=adapter.tenant_id,
        tenant=adapter.tenant,
    )
