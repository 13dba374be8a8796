"""/api/v1/tenants: create, list, show, change, delete."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from litestar import Request, Router, delete, get, patch, post

from loraplex.db.database import Database
from loraplex.errors import (
    ConflictError,
    InvalidNameError,
    InvalidRequestError,
    NameReservedError,
)
from loraplex.gateway.authentication import get_target_id
from loraplex.gateway.body import check_text, read_body
from loraplex.gateway.directory import DEFAULT_WEIGHT, Directory
from loraplex.gateway.names import NameIndex
from loraplex.gateway.paging import build_list, read_page, read_query, show_time
from loraplex.gateway.permission import get_identity, require_admin
from loraplex.tenants.limits import check_limits, check_weight
from loraplex.tenants.service import TenantService, get_tenant, list_tenants
from loraplex_registry.wire.identity import Identity
from loraplex_registry.wire.naming import is_name

_SETTABLE_STATES = ("active", "suspended")


class TenantAdapters(Protocol):
    """What the registry does for a tenant as a whole; the tenant is the target of `by`."""

    async def count_adapters(self, by: Identity, /) -> int:
        """Return the number of living adapters."""
        ...

    async def delete_adapters(self, by: Identity, /) -> int:
        """Delete all adapters and return how many there were."""
        ...


class TenantCreate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tenants."""

    name: str
    display_name: str | None = None
    limits: dict[str, Any] | None = None
    bases: list[str] | None = None
    weight: int | None = None


class TenantPatch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of PATCH /tenants/{tenant}: a JSON merge patch, null clears."""

    display_name: str | msgspec.UnsetType | None = msgspec.UNSET
    limits: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    bases: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    state: str | msgspec.UnsetType = msgspec.UNSET
    weight: int | msgspec.UnsetType | None = msgspec.UNSET


def build_tenant_router(
    database: Database,
    service: TenantService,
    directory: Directory,
    names: NameIndex,
    adapters: TenantAdapters,
) -> Router:
    """Return the routes over `database`, writing through `service`."""

    @post("/")
    async def create(request: Request[Any, Any, Any]) -> dict[str, Any]:
        by = require_admin(request)
        read_query(request, ())
        body = await read_body(request, TenantCreate)
        limits, weight = check_limits(body.limits or {}), check_weight(body.weight)
        await names.ensure_fresh()
        _check_name(body.name, names)
        _check_bases(body.bases, names)
        display_name = check_text(body.display_name, "display_name")
        row = await service.create_tenant(by, body.name, display_name, body.bases, limits, weight)
        await directory.refresh()
        return show_tenant(row)

    @get("/")
    async def list_all(request: Request[Any, Any, Any]) -> dict[str, Any]:
        identity = get_identity(request)
        page, _ = read_page(request)
        own = None if identity.is_platform else _own_id(identity, directory)
        rows = await list_tenants(database, own, page.before, page.limit + 1)
        return build_list(rows, page, show_tenant)

    @get("/{tenant:str}")
    async def show(request: Request[Any, Any, Any]) -> dict[str, Any]:
        read_query(request, ())
        return show_tenant(await get_tenant(database, get_target_id(get_identity(request))))

    @patch("/{tenant:str}")
    async def change(request: Request[Any, Any, Any]) -> dict[str, Any]:
        by = require_admin(request)
        read_query(request, ())
        body = await read_body(request, TenantPatch)
        await names.ensure_fresh()
        changes = _read_changes(body, names)
        row = await service.change_tenant(by, get_target_id(by), changes)
        await directory.refresh()
        return show_tenant(row)

    @delete("/{tenant:str}", status_code=204)
    async def remove(request: Request[Any, Any, Any]) -> None:
        by = require_admin(request)
        is_cascade = _read_cascade(request)
        count = await adapters.count_adapters(by)
        if count and not is_cascade:
            found = "1 adapter; delete it" if count == 1 else f"{count} adapters; delete them"
            raise ConflictError(
                f"{by.target_tenant} has {found} first, or add ?cascade=true to delete all of the tenant"
            )
        await adapters.delete_adapters(by)
        await service.delete_tenant(by, get_target_id(by))
        await directory.refresh()
        # Its keys are dead now; what they uploaded since the first deletion must not outlive the tenant.
        await adapters.delete_adapters(by)

    return Router("/api/v1/tenants", route_handlers=[create, list_all, show, change, remove])


def show_tenant(row: dict[str, Any]) -> dict[str, Any]:
    """A tenant as the API shows it."""
    return {
        "name": row["name"],
        "display_name": row["display_name"],
        "state": row["state"],
        "bases": row["bases"],
        "limits": row["limits"] or {},
        "weight": row["weight"] or DEFAULT_WEIGHT,
        "created_at": show_time(row["created_at"]),
    }


def _own_id(identity: Identity, directory: Directory) -> Any:
    assert identity.tenant is not None, "a key of no tenant is a platform key"
    tenant = directory.find_tenant(identity.tenant)
    return None if tenant is None else tenant.id


def _check_name(name: str, names: NameIndex) -> None:
    if not is_name(name):
        raise InvalidNameError(param="name")
    if names.find_base(name) is not None:
        raise NameReservedError(f"{name!r} is the name of a base model; choose another", param="name")


def _check_bases(bases: list[str] | None, names: NameIndex) -> None:
    for name in bases or ():
        if names.find_base(name) is None:
            known = ", ".join(base.name for base in names.bases()) or "none yet"
            raise InvalidRequestError(f"There is no base {name!r}; bases are: {known}", param="bases")


def _read_changes(body: TenantPatch, names: NameIndex) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if body.limits is not msgspec.UNSET:
        changes["limits"] = None if body.limits is None else check_limits(body.limits)
    if body.weight is not msgspec.UNSET:
        changes["weight"] = check_weight(body.weight)
    if body.display_name is not msgspec.UNSET:
        changes["display_name"] = check_text(body.display_name, "display_name")
    if body.bases is not msgspec.UNSET:
        _check_bases(body.bases, names)
        changes["bases"] = body.bases
    if body.state is not msgspec.UNSET:
        if body.state not in _SETTABLE_STATES:
            raise InvalidRequestError("state is active or suspended", param="state")
        changes["state"] = body.state
    return changes


def _read_cascade(request: Request[Any, Any, Any]) -> bool:
    text = read_query(request, {"cascade"}).get("cascade", "false")
    if text not in ("true", "false"):
        raise InvalidRequestError("cascade is true or false", param="cascade")
    return text == "true"
