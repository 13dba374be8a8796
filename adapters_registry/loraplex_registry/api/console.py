"""What pages in the gateway's process do with adapters: the routes' services under the routes' scopes, without HTTP.

Every act is in the name of `by`, whose target tenant, as the gateway has found it, has the adapter.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from litestar import Request
from litestar.response import Stream

from loraplex_registry.adapters.lookup import find_live, get_adapter, get_version, list_aliases, list_states
from loraplex_registry.adapters.lookup import list_versions as list_rows
from loraplex_registry.adapters.page import PageOrder, build_page
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.adapters.view import show_adapter, show_version
from loraplex_registry.aliases import Precondition
from loraplex_registry.api.caller import READ, SEE, WRITE, judge_admin, judge_entry
from loraplex_registry.api.sending import list_files, open_file
from loraplex_registry.api.service import Services
from loraplex_registry.api.upload import take_upload
from loraplex_registry.wire.adapter import AdapterView, AliasChangeView, AliasView, ManifestFile, Target, VersionView
from loraplex_registry.wire.identity import Identity

_NUM_CHANGES = 20
_Act = Callable[[TenantRef, str, int, Identity], Awaitable[VersionView]]


class Console:
    """Adapters as whoever looks at a page may see and change them; every method raises RegistryError."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._aliases = services.aliases

    @property
    def purge_after_days(self) -> int:
        """How long a retired version can be restored."""
        return self._services.settings.purge_after_days

    @property
    def max_upload_bytes(self) -> int:
        """How much an upload in one body may be."""
        return self._services.settings.max_upload_bytes

    async def show(self, by: Identity, adapter: str) -> AdapterView:
        """Return an adapter."""
        tenant = _enter(by, *SEE)
        async with self._services.database.read() as session:
            row = await get_adapter(session, tenant, adapter)
            states = await list_states(session, [row.id])
            return show_adapter(row, states[row.id], await list_aliases(session, [row.id]))

    async def list_versions(
        self, by: Identity, adapter: str, limit: int, cursor: str | None
    ) -> tuple[list[VersionView], str | None]:
        """Return a page of an adapter's versions, newest first, and the cursor of the next one."""
        tenant = _enter(by, *SEE)
        async with self._services.database.read() as session:
            row = await get_adapter(session, tenant, adapter)
            live = await find_live(session, row.id)
            order = PageOrder(limit, cursor)
            page = build_page(await list_rows(session, row.id, order), limit, lambda version: version.number)
            return [show_version(version, live) for version in page.data], page.next_cursor

    async def show_version(
        self, by: Identity, adapter: str, number: int
    ) -> tuple[VersionView, tuple[ManifestFile, ...]]:
        """Return a version, and its files as far as they are kept here."""
        tenant = _enter(by, *SEE)
        async with self._services.database.read() as session:
            version = await get_version(session, tenant, adapter, number)
            view = show_version(version, await find_live(session, version.adapter_id))
            return view, list_files(version)

    async def open_file(self, by: Identity, adapter: str, number: int, name: str) -> Stream:
        """Return the answer that sends a file of a version as it was uploaded."""
        return await open_file(self._services, _enter(by, READ), adapter, number, name)

    async def list_aliases(self, by: Identity, adapter: str) -> list[AliasView]:
        """Return the aliases that are set, by name."""
        return await self._aliases.list(_enter(by, *SEE), adapter)

    async def list_changes(self, by: Identity, adapter: str, alias: str) -> list[AliasChangeView]:
        """Return what an alias pointed to lately, newest first."""
        page = await self._aliases.history(_enter(by, *SEE), adapter, alias, PageOrder(_NUM_CHANGES))
        return page.data

    async def move_alias(
        self, by: Identity, adapter: str, alias: str, targets: Sequence[Target], revision: int | None
    ) -> AliasView:
        """Point an alias to versions if it is still at the revision that was seen, None: if it is not set."""
        view, _ = await self._aliases.put(_enter(by, WRITE), adapter, alias, targets, _seen(revision), by)
        return view

    async def roll_back(self, by: Identity, adapter: str, alias: str, revision: int) -> AliasView:
        """Point an alias to where it pointed before."""
        return await self._aliases.roll_back(_enter(by, WRITE), adapter, alias, _seen(revision), by)

    async def delete_alias(self, by: Identity, adapter: str, alias: str, revision: int) -> None:
        """Delete an alias."""
        await self._aliases.delete(_enter(by, WRITE), adapter, alias, _seen(revision), by)

    async def retire(self, by: Identity, adapter: str, number: int) -> VersionView:
        """Retire a version."""
        return await self._services.lifecycle.retire(_enter(by, WRITE), adapter, number, by)

    async def restore(self, by: Identity, adapter: str, number: int) -> VersionView:
        """Make a retired version what it was before."""
        return await self._services.lifecycle.restore(_enter(by, WRITE), adapter, number, by)

    async def quarantine(self, by: Identity, adapter: str, number: int) -> VersionView:
        """Take a version out of service."""
        return await self._as_admin(by, adapter, number, self._services.lifecycle.quarantine)

    async def release(self, by: Identity, adapter: str, number: int) -> VersionView:
        """Make a quarantined version ready again."""
        return await self._as_admin(by, adapter, number, self._services.lifecycle.release)

    async def make_default(self, by: Identity, adapter: str) -> AdapterView:
        """Let the tenant's bare name mean an adapter."""
        return await self._services.lifecycle.change(_enter(by, WRITE), adapter, by, makes_default=True)

    async def delete(self, by: Identity, adapter: str) -> None:
        """Delete an adapter."""
        await self._services.lifecycle.delete(_enter(by, WRITE), adapter, by)

    async def upload(self, by: Identity, adapter: str, request: Request[Any, Any, Any]) -> tuple[int, Any]:
        """Take a version from the body of a request, whose query is that of the route; return status and view."""
        result = await take_upload(request, self._services, _enter(by, WRITE), adapter, by)
        return result.status, result.body

    async def _as_admin(self, by: Identity, adapter: str, number: int, act: _Act) -> VersionView:
        tenant = _enter(by, *SEE)
        return await act(tenant, adapter, number, judge_admin(by, writes=True))


def _enter(by: Identity, *scopes: str) -> TenantRef:
    assert by.target_tenant is not None, "the page names the tenant"
    return judge_entry(by, by.target_tenant, *scopes)


def _seen(revision: int | None) -> Precondition:
    return Precondition(must_be_absent=True) if revision is None else Precondition(revisions=frozenset((revision,)))
