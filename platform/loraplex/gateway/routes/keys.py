"""/api/v1/tenants/{tenant}/keys: create, list, revoke."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from litestar import Request, Router, delete, get, post

from loraplex.db.database import Database
from loraplex.errors import PermissionDeniedError
from loraplex.gateway.authentication import get_target_id
from loraplex.gateway.body import check_text, read_body, to_utc
from loraplex.gateway.directory import Directory
from loraplex.gateway.paging import build_list, read_page, show_time
from loraplex.gateway.permission import get_identity, require_scope
from loraplex.keys.service import DEFAULT_SCOPES, KeyService, list_keys
from loraplex_registry.wire.identity import Identity

_WRITE = "keys:write"


class KeyCreate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tenants/{tenant}/keys. With `role` it is a platform key, and scopes mean nothing."""

    name: str
    owner: str | None = None
    scopes: list[str] | None = None
    expires_at: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    role: str | None = None


def build_key_router(database: Database, service: KeyService, directory: Directory) -> Router:
    """Return the routes over `database`, writing through `service`."""

    @post("/")
    async def create(request: Request[Any, Any, Any]) -> dict[str, Any]:
        by = require_scope(request, _WRITE)
        body = await read_body(request, KeyCreate)
        row, text = await service.create_key(
            by,
            tenant_id=get_target_id(by),
            tenant=by.target_tenant or "",
            name=check_text(body.name, "name") or "",
            # A key belongs to whoever made it, unless another owner is named.
            owner=check_text(body.owner, "owner") or by.actor,
            scopes=_read_scopes(body),
            role=body.role or "tenant",
            expires_at=None if body.expires_at is None else to_utc(body.expires_at, "expires_at"),
        )
        await directory.refresh()
        return show_key(row) | {"key": text}

    @get("/")
    async def list_all(request: Request[Any, Any, Any]) -> dict[str, Any]:
        by = _require_reader(request)
        page, _ = read_page(request)
        rows = await list_keys(database, by, get_target_id(by), page.before, page.limit + 1)
        return build_list(rows, page, show_key)

    @delete("/{key_id:str}", status_code=204)
    async def revoke(request: Request[Any, Any, Any]) -> None:
        by = require_scope(request, _WRITE)
        key_id: str = request.path_params["key_id"]
        await service.revoke_key(by, tenant_id=get_target_id(by), tenant=by.target_tenant or "", key_id=key_id)
        await directory.refresh()

    return Router("/api/v1/tenants/{tenant:str}/keys", route_handlers=[create, list_all, revoke])


def show_key(row: dict[str, Any]) -> dict[str, Any]:
    """A key as the API shows it: never its secret."""
    return {
        "id": row["public_id"],
        "name": row["name"],
        "owner": row["owner"],
        "role": row["role"],
        "scopes": row["scopes"],
        "created_at": show_time(row["created_at"]),
        "created_by": row["created_by"],
        "expires_at": show_time(row["expires_at"]),
        "revoked_at": show_time(row["revoked_at"]),
    }


def _read_scopes(body: KeyCreate) -> list[str]:
    if body.scopes is not None:
        return body.scopes
    return [] if body.role else list(DEFAULT_SCOPES)


def _require_reader(request: Request[Any, Any, Any]) -> Identity:
    """Read-only admins see keys; tenants need the scope that also writes them, as there is no other."""
    identity = get_identity(request)
    if not identity.is_platform and not identity.has_scope(_WRITE):
        raise PermissionDeniedError(f"This key lacks the scope {_WRITE}")
    return identity
