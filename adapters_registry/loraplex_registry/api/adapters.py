"""Routes of adapters and versions, upload and download among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Controller, Response, delete, get, patch, post
from litestar.response import Stream

from loraplex_registry.adapters.lookup import (
    find_live,
    get_adapter,
    get_version,
    list_adapters,
    list_aliases,
    list_states,
    list_versions,
)
from loraplex_registry.adapters.page import Page, build_page
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.adapters.view import show_adapter, show_version
from loraplex_registry.api.caller import READ, SEE, WRITE, check_admin, enter_tenant
from loraplex_registry.api.reading import read_json, read_number, read_page_order, read_query
from loraplex_registry.api.sending import open_file
from loraplex_registry.api.service import Call, Name, Number, Services, Work
from loraplex_registry.api.upload import take_upload
from loraplex_registry.db.model import AdapterRow, AliasRow
from loraplex_registry.errors import InvalidRequestError, UnsupportedParameterError
from loraplex_registry.wire.adapter import AdapterView, Report, VersionView
from loraplex_registry.wire.limits import RATE_LIMIT_TO_MAX, find_limit_fault

_ADAPTER = "/{adapter:str}"
_VERSION = _ADAPTER + "/versions/{number:str}"


class AdapterPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of an adapter can be changed: a JSON merge patch. `limits` are an administrator's to set."""

    is_default: bool | msgspec.UnsetType = msgspec.UNSET
    limits: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET


class AdapterRoutes(Controller):
    """`/api/v1/tenants/{tenant}/adapters`."""

    path = "/api/v1/tenants/{tenant:str}/adapters"

    @get()
    async def list_all(self, request: Call, services: Work, tenant: Name) -> Page[AdapterView]:
        """List the tenant's adapters, newest first."""
        target, _ = enter_tenant(request, tenant, *SEE)
        order = read_page_order(request)
        async with services.database.read() as session:
            page = build_page(await list_adapters(session, target, order), order.limit, lambda row: row.id)
            ids = [row.id for row in page.data]
            states, aliases = await list_states(session, ids), await list_aliases(session, ids)
        return Page([show_adapter(row, states[row.id], _of(row, aliases)) for row in page.data], page.next_cursor)

    @get(_ADAPTER)
    async def show(self, request: Call, services: Work, tenant: Name, adapter: Name) -> AdapterView:
        """Show one adapter."""
        target, _ = enter_tenant(request, tenant, *SEE)
        read_query(request)
        async with services.database.read() as session:
            row = await get_adapter(session, target, adapter)
            states = await list_states(session, [row.id])
            return show_adapter(row, states[row.id], await list_aliases(session, [row.id]))

    @patch(_ADAPTER)
    async def change(self, request: Call, services: Work, tenant: Name, adapter: Name) -> AdapterView:
        """Make an adapter the tenant's default, or limit the calls of it."""
        target, caller = enter_tenant(request, tenant, WRITE)
        read_query(request)
        wanted = await read_json(request, AdapterPatch)
        if wanted.is_default is False:
            raise InvalidRequestError("Make another adapter the default instead", param="is_default")
        if wanted.limits is not msgspec.UNSET:
            # or a tenant could take back what was set to hold it
            check_admin(request, writes=True)
            _check_limits(wanted.limits or {})
        return await services.lifecycle.change(
            target, adapter, caller, makes_default=wanted.is_default is True, limits=wanted.limits
        )

    @delete(_ADAPTER, status_code=204)
    async def remove(self, request: Call, services: Work, tenant: Name, adapter: Name) -> None:
        """Delete an adapter."""
        target, caller = enter_tenant(request, tenant, WRITE)
        read_query(request)
        await services.lifecycle.delete(target, adapter, caller)

    @post(_ADAPTER + "/versions", request_max_body_size=None)
    async def upload(self, request: Call, services: Work, tenant: Name, adapter: Name) -> Response[Any]:
        """Upload a PEFT folder as the adapter's next version."""
        target, caller = enter_tenant(request, tenant, WRITE)
        result = await take_upload(request, services, target, adapter, caller)
        return Response(result.body, status_code=result.status)

    @get(_ADAPTER + "/versions")
    async def list_all_versions(self, request: Call, services: Work, tenant: Name, adapter: Name) -> Page[VersionView]:
        """List an adapter's versions, newest first."""
        target, _ = enter_tenant(request, tenant, *SEE)
        order = read_page_order(request)
        async with services.database.read() as session:
            row = await get_adapter(session, target, adapter)
            live = await find_live(session, row.id)
            page = build_page(await list_versions(session, row.id, order), order.limit, lambda version: version.number)
            return Page([show_version(version, live) for version in page.data], page.next_cursor)

    @get(_VERSION)
    async def show_version(
        self, request: Call, services: Work, tenant: Name, adapter: Name, number: Number
    ) -> VersionView:
        """Show one version, retired ones too."""
        target, _ = enter_tenant(request, tenant, *SEE)
        read_query(request)
        return await _read_version(services, target, adapter, read_number(number))

    @get(_VERSION + "/report")
    async def show_report(self, request: Call, services: Work, tenant: Name, adapter: Name, number: Number) -> Report:
        """Show the report of a version's checks."""
        target, _ = enter_tenant(request, tenant, *SEE)
        read_query(request)
        return (await _read_version(services, target, adapter, read_number(number))).report

    @get(_VERSION + "/files/{name:str}")
    async def download(
        self, request: Call, services: Work, tenant: Name, adapter: Name, number: Number, name: Name
    ) -> Stream:
        """Send a file of a version as it was uploaded."""
        target, _ = enter_tenant(request, tenant, READ)
        read_query(request)
        return await open_file(services, target, adapter, read_number(number), name)

    @delete(_VERSION, status_code=200)
    async def retire(self, request: Call, services: Work, tenant: Name, adapter: Name, number: Number) -> VersionView:
        """Retire a version."""
        target, caller = enter_tenant(request, tenant, WRITE)
        read_query(request)
        return await services.lifecycle.retire(target, adapter, read_number(number), caller)

    @post(_VERSION + "/restore", status_code=200)
    async def restore(self, request: Call, services: Work, tenant: Name, adapter: Name, number: Number) -> VersionView:
        """Make a retired version ready again."""
        target, caller = enter_tenant(request, tenant, WRITE)
        read_query(request)
        return await services.lifecycle.restore(target, adapter, read_number(number), caller)

    @post(_VERSION + "/quarantine", status_code=200)
    async def quarantine(
        self, request: Call, services: Work, tenant: Name, adapter: Name, number: Number
    ) -> VersionView:
        """Take a version out of service."""
        target, _ = enter_tenant(request, tenant, *SEE)
        read_query(request)
        admin = check_admin(request, writes=True)
        return await services.lifecycle.quarantine(target, adapter, read_number(number), admin)

    @post(_VERSION + "/release", status_code=200)
    async def release(self, request: Call, services: Work, tenant: Name, adapter: Name, number: Number) -> VersionView:
        """Make a quarantined version ready again."""
        target, _ = enter_tenant(request, tenant, *SEE)
        read_query(request)
        admin = check_admin(request, writes=True)
        return await services.lifecycle.release(target, adapter, read_number(number), admin)


def _check_limits(limits: dict[str, Any]) -> None:
    fault = find_limit_fault(limits, RATE_LIMIT_TO_MAX)
    if fault is not None:
        raise (UnsupportedParameterError if fault.is_unknown else InvalidRequestError)(fault.message, param=fault.param)


async def _read_version(services: Services, tenant: TenantRef, adapter: str, number: int) -> VersionView:
    async with services.database.read() as session:
        version = await get_version(session, tenant, adapter, number)
        return show_version(version, await find_live(session, version.adapter_id))


def _of(adapter: AdapterRow, aliases: Sequence[AliasRow]) -> list[AliasRow]:
    return [alias for alias in aliases if alias.adapter_id == adapter.id]
