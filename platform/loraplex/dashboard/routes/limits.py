"""Limits: how tenants stand against theirs; of one tenant its adapters and keys, too."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.params import FromPath

from loraplex.dashboard.menu import Entry
from loraplex.dashboard.section import Desk, Section
from loraplex.dashboard.standing import Holder, Limit, read_limits_of
from loraplex.errors import NotFoundError
from loraplex.gateway.authentication import target
from loraplex.gateway.paging import read_query
from loraplex.gateway.permission import get_identity, require_platform
from loraplex.keys.service import list_keys
from loraplex.quotas.quota import Subject
from loraplex.tenants.service import get_tenant, list_tenants
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.limits import read_limits

_MAX_LISTED = 1000
_PAGE = 200
_STORED = ("adapter_bytes", "adapter_versions", "adapter_rank")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody with all kinds of limits, and what else the page says."""

    name: str
    note: str
    limits: Sequence[Limit]

    @property
    def ratio(self) -> float:
        """How near the nearest limit is."""
        return max(limit.ratio for limit in self.limits)


def build_limits(desk: Desk) -> Section:
    """Return the page of all tenants, and that of one."""

    @get("/ui/limits")
    async def show_limits(request: Request[Any, Any, Any]) -> Response[str]:
        identity = get_identity(request)
        if not identity.is_platform:
            read_query(request, ())
            return await _show_tenant(desk, request, identity, identity.tenant or "")
        require_platform(request)
        text = read_query(request, {"q"}).get("q", "").strip()
        rows = [row for row in await _list_rows(desk) if text in row.name]
        rows.sort(key=lambda row: (-row.ratio, row.name))
        return desk.pages.show(request, "limits.html", rows=rows, text=text)

    @get("/ui/limits/{tenant:str}")
    async def show_tenant(request: Request[Any, Any, Any], tenant: FromPath[str]) -> Response[str]:
        read_query(request, ())
        return await _show_tenant(desk, request, get_identity(request), tenant)

    return Section(entries=[Entry("/ui/limits", "Limits")], handlers=[show_limits, show_tenant])


async def _list_rows(desk: Desk) -> list[Row]:
    database = desk.parts.database
    tenants: list[dict[str, Any]] = []
    before: uuid.UUID | None = None
    while len(tenants) < _MAX_LISTED and (page := await list_tenants(database, None, before, _PAGE)):
        tenants += page
        before = page[-1]["id"]
    found = await read_limits_of(database, desk.parts.limiter, "tenant", [_hold(one) for one in tenants])
    return [Row(name=one["name"], note=one["state"], limits=limits) for one, limits in zip(tenants, found, strict=True)]


def _hold(tenant: Mapping[str, Any]) -> Holder:
    tenant_id = str(tenant["id"])
    return Holder(tenant_id, Subject("tenant", tenant_id, tenant_id), read_limits(tenant["limits"]))


async def _show_tenant(desk: Desk, request: Request[Any, Any, Any], by: Identity, name: str) -> Response[str]:
    aimed = target(by, name, desk.parts.directory)
    if aimed is None:
        raise NotFoundError("There is no such tenant, or it is not yours.", param="tenant")
    assert aimed.target_tenant_id is not None
    tenant_id = uuid.UUID(aimed.target_tenant_id)
    tenant = await get_tenant(desk.parts.database, tenant_id)
    (limits,) = await read_limits_of(desk.parts.database, desk.parts.limiter, "tenant", [_hold(tenant)])
    whole = Row(name=name, note=tenant["state"], limits=limits)
    return desk.pages.show(
        request,
        "limits_of_tenant.html",
        tenant=tenant,
        whole=whole,
        stored={kind: (tenant["limits"] or {}).get(kind) for kind in _STORED},
        adapters=await _list_adapters(desk, name),
        keys=await _list_keys(desk, by, tenant_id),
    )


async def _list_adapters(desk: Desk, tenant: str) -> list[Row]:
    """Those that have limits of their own."""
    await desk.parts.names.ensure_fresh()
    found = [one for one in desk.parts.names.adapters([tenant]) if one.limits is not None]
    holders = [Holder(one.adapter_id, Subject("adapter", one.adapter_id, one.tenant_id), one.limits) for one in found]
    listed = await read_limits_of(desk.parts.database, desk.parts.limiter, "adapter", holders)
    return [Row(name=one.name, note=one.base, limits=limits) for one, limits in zip(found, listed, strict=True)]


async def _list_keys(desk: Desk, by: Identity, tenant_id: uuid.UUID) -> list[Row]:
    """Those that have limits of their own; they are shown to whom the API shows them."""
    if not by.has_scope("keys:write") and not by.is_platform:
        return []
    rows = await list_keys(desk.parts.database, by, tenant_id, None, _MAX_LISTED)
    found = [row for row in rows if row["limits"] and row["revoked_at"] is None]
    first = desk.parts.directory.find_first_key
    holders = [
        Holder(row["public_id"], Subject("key", first(row["public_id"]), str(tenant_id)), read_limits(row["limits"]))
        for row in found
    ]
    listed = await read_limits_of(desk.parts.database, desk.parts.limiter, "key", holders)
    return [
        Row(name=row["name"], note=row["public_id"], limits=limits) for row, limits in zip(found, listed, strict=True)
    ]
