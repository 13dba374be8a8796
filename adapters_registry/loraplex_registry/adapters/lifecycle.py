"""What happens to adapters and versions after upload: retire, restore, quarantine, release, default, delete."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import sqlalchemy as sa

from loraplex_registry.adapters import version_state
from loraplex_registry.adapters.alias_row import make_default, set_targets
from loraplex_registry.adapters.lookup import (
    find_live,
    get_adapter,
    get_version,
    list_aliases,
    list_states,
)
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.adapters.view import read_quarantine, read_targets, show_adapter, show_version
from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import AdapterRow, VersionRow
from loraplex_registry.errors import ConflictError, QuarantinedError, RetiredError
from loraplex_registry.events import record_event
from loraplex_registry.wire.adapter import AdapterView, VersionView
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.limits import merge_limits


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
            ConflictError: An alias targets it, it is still being validated (restored, it would not be), it is a full
                fine-tune, or one stands in its place for now.
            RetiredError: It is purged.
        """

        async def retire(change: Change, version: VersionRow) -> None:
            if version.state != "retired":
                _check_no_full(version, "retired by closing its escalation")
                await _check_not_replaced(change, version)
                _check_judged(version)
                await _check_untargeted(change, version)
                version_state.retire(change, version, by)

        view = await self._change_version(tenant, name, number, retire, allows_quarantined=True)
        self.forget(view.base_model, (view.digest,))
        return view

    async def restore(self, tenant: TenantRef, name: str, number: int, by: Identity) -> VersionView:
        """Make a retired version what it was before: ready, or quarantined.

        Raises:
            NotFoundError: There is no such version.
            ConflictError: It is not retired, or it is a full fine-tune, which its escalation allowed.
            QuarantinedError: It is quarantined.
            RetiredError: It is purged.
        """

        async def restore(change: Change, version: VersionRow) -> None:
            _check_no_full(version, "served again by a new escalation")
            if version.state != "retired":
                raise ConflictError(f"Version {number} is {version.state}; only a retired version can be restored")
            version_state.restore(change, version, by)

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
                version_state.quarantine(change, version, by, "by_admin", "An administrator took it out of service.")

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
                version_state.quarantine(change, version, by, "load_failed", message)
            return len(versions)

        return await self._database.change(work)

    async def release(self, tenant: TenantRef, name: str, number: int, by: Identity) -> VersionView:
        """Make a quarantined version ready again, after the engines have forgotten what they had against it.

        A ready version stays so, and the engines forget: what one of them has quarantined for itself ends by this too.
        One whose answers were wrong is recorded as `forced`: nothing says that they are right now.

        Raises:
            NotFoundError: There is no such version.
            ConflictError: It is retired, or still being validated.
            RetiredError: It is purged.
        """

        async def release(change: Change, version: VersionRow) -> None:
            if version.state == "retired":
                raise ConflictError(f"Version {number} is retired; restore it instead")
            _check_judged(version)
            found = read_quarantine(version.state, version.quarantine)
            if found is not None:
                forced = {"forced": True} if found.reason == "parity" else {}
                version_state.make_ready(change, version, by, "adapter.version_released", reason=found.reason, **forced)

        async with self._database.read() as session:
            version = await get_version(session, tenant, name, number)
        if version.state in ("ready", "quarantined"):
            await self.forget_failure(version.digest)
        return await self._change_version(tenant, name, number, release, allows_quarantined=True)

    async def change(
        self,
        tenant: TenantRef,
        name: str,
        by: Identity,
        *,
        makes_default: bool = False,
        limits: Mapping[str, int | None] | msgspec.UnsetType | None = msgspec.UNSET,
    ) -> AdapterView:
        """Change an adapter and return it.

        Args:
            tenant: Whose adapter.
            name: Its name.
            by: Who does it.
            makes_default: Let the tenant's bare name mean this adapter.
            limits: A merge patch of the limits on calls of it, judged already: UNSET changes none, None clears all.

        Raises:
            NotFoundError: There is no such adapter.
        """

        async def work(change: Change) -> AdapterView:
            adapter = await get_adapter(change.session, tenant, name)
            if makes_default:
                before = {"is_default": adapter.is_default}
                await make_default(change, adapter)
                _record(change, adapter, by, "adapter.made_default", before, {"is_default": True})
            if limits is not msgspec.UNSET:
                _set_limits(change, adapter, by, merge_limits(adapter.limits, limits))
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


def _check_not_gone(version: VersionRow, *, allows_quarantined: bool) -> None:
    if version.state == "quarantined" and not allows_quarantined:
        raise QuarantinedError(f"Version {version.number} is quarantined; an admin must release it first")
    if version.state == "purged":
        if version.kind == "full":
            raise RetiredError(f"Version {version.number} was a full fine-tune and is gone; open a new escalation")
        raise RetiredError(f"Version {version.number} is purged: its bytes are gone; upload it again")


def _check_judged(version: VersionRow) -> None:
    if version.state == "validating":
        raise ConflictError(f"Version {version.number} is still being validated; wait until it is ready")


def _check_no_full(version: VersionRow, way: str) -> None:
    if version.kind == "full":
        raise ConflictError(f"Version {version.number} is a full fine-tune; it is {way}")


async def _check_not_replaced(change: Change, version: VersionRow) -> None:
    """An escalation that is active promises to put back what was live before."""
    query = sa.select(VersionRow).where(VersionRow.adapter_id == version.adapter_id, VersionRow.pool.is_not(None))
    for full in (await change.session.execute(query)).scalars():
        targets = read_targets((full.replaced or {}).get("targets", []))
        if any(target.version == version.number for target in targets):
            raise ConflictError(
                f"Version {version.number} is live again when the escalation of version {full.number} is reverted; "
                "close that first"
            )


async def _check_untargeted(change: Change, version: VersionRow) -> None:
    for alias in await list_aliases(change.session, [version.adapter_id]):
        if any(target.version == version.number for target in read_targets(alias.targets)):
            raise ConflictError(f"The alias {alias.name} targets version {version.number}; point it elsewhere first")


async def _list_all(change: Change, tenant: TenantRef) -> Sequence[AdapterRow]:
    query = sa.select(AdapterRow).where(AdapterRow.tenant_id == tenant.id, AdapterRow.deleted_at.is_(None))
    return (await change.session.execute(query)).scalars().all()


def _set_limits(change: Change, adapter: AdapterRow, by: Identity, limits: dict[str, int] | None) -> None:
    if limits == adapter.limits:
        return
    _record(change, adapter, by, "adapter.limits_set", {"limits": adapter.limits}, {"limits": limits})
    adapter.limits, adapter.changed_epoch = limits, change.epoch


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
        .values(state="retired", retired_at=at, pending=None)
    )
    before = {"is_default": adapter.is_default}
    adapter.deleted_at, adapter.is_default, adapter.changed_epoch = at, False, change.epoch
    _record(change, adapter, by, "adapter.deleted", before, None)
    await change.session.flush()
    return digests


def _record(
    change: Change,
    adapter: AdapterRow,
    by: Identity,
    action: str,
    before: dict[str, Any],
    after: dict[str, Any] | None,
) -> None:
    record_event(
        change.session,
        by,
        action,
        f"{adapter.tenant}/{adapter.name}",
        tenant_id=adapter.tenant_id,
        tenant=adapter.tenant,
        before=before,
        after=after,
    )
