"""/api/v1/tenants/{tenant}/keys: create, list, change, rotate, revoke."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from litestar import Request, Router, delete, get, patch, post

from loraplex.db.database import Database
from loraplex.errors import InvalidRequestError, PermissionDeniedError
from loraplex.gateway.authentication import get_target_id
from loraplex.gateway.body import check_text, read_body, to_utc
from loraplex.gateway.directory import Directory
from loraplex.gateway.paging import build_list, read_page, read_query, show_time
from loraplex.gateway.permission import get_identity, require_scope
from loraplex.keys.grant import DEFAULT_SCOPES
from loraplex.keys.service import DEFAULT_OVERLAP_S, MAX_OVERLAP_S, KeyChange, KeyService, NewKey, list_keys
from loraplex_registry.wire.identity import Identity

_WRITE = "keys:write"


_Time = Annotated[datetime, msgspec.Meta(tz=True)]


class KeyCreate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tenants/{tenant}/keys. With `role` it is a platform key, and scopes mean nothing."""

    name: str
    owner: str | None = None
    scopes: list[str] | None = None
    expires_at: _Time | None = None
    role: str | None = None
    limits: dict[str, Any] | None = None
    priority: int | None = None


class KeyPatch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of PATCH /tenants/{tenant}/keys/{key_id}: a JSON merge patch, null clears."""

    limits: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    priority: int | msgspec.UnsetType | None = msgspec.UNSET


class KeyRotate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST …/keys/{key_id}/rotate; without `expires_at` the new key ends when the old one would."""

    overlap_s: int | None = None
    expires_at: _Time | None = None


def build_key_router(database: Database, service: KeyService, directory: Directory) -> Router:
    """Return the routes over `database`, writing through `service`."""

    @post("/")
    async def create(request: Request[Any, Any, Any]) -> dict[str, Any]:
        by = require_scope(request, _WRITE)
        read_query(request, ())
        new = _read_new(await read_body(request, KeyCreate), by)
        row, text = await service.create_key(by, get_target_id(by), by.target_tenant or "", new)
        await directory.refresh()
        return show_key(row) | {"key": text}

    @patch("/{key_id:str}")
    async def change(request: Request[Any, Any, Any]) -> dict[str, Any]:
        by = require_scope(request, _WRITE)
        read_query(request, ())
        body = await read_body(request, KeyPatch)
        wanted = KeyChange(limits=body.limits, priority=body.priority)
        key_id: str = request.path_params["key_id"]
        row = await service.change_key(by, get_target_id(by), by.target_tenant or "", key_id, wanted)
        await directory.refresh()
        return show_key(row)

    @post("/{key_id:str}/rotate")
    async def rotate(request: Request[Any, Any, Any]) -> dict[str, Any]:
        by = require_scope(request, _WRITE)
        read_query(request, ())
        body = await read_body(request, KeyRotate)
        overlap_s = _check_overlap(body.overlap_s)
        ends_at = msgspec.UNSET if body.expires_at is None else to_utc(body.expires_at, "expires_at")
        key_id: str = request.path_params["key_id"]
        row, text = await service.rotate_key(by, get_target_id(by), by.target_tenant or "", key_id, overlap_s, ends_at)
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
        read_query(request, ())
        key_id: str = request.path_params["key_id"]
        await service.revoke_key(by, tenant_id=get_target_id(by), tenant=by.target_tenant or "", key_id=key_id)
        await directory.refresh()

    return Router("/api/v1/tenants/{tenant:str}/keys", route_handlers=[create, list_all, change, rotate, revoke])


def show_key(row: dict[str, Any]) -> dict[str, Any]:
    """A key as the API shows it: never its secret."""
    return {
        "id": row["public_id"],
        "name": row["name"],
        "owner": row["owner"],
        "role": row["role"],
        "scopes": row["scopes"],
        "limits": row["limits"] or {},
        "priority": row["priority"] or 0,
        "created_at": show_time(row["created_at"]),
        "created_by": row["created_by"],
        "expires_at": show_time(row["expires_at"]),
        "revoked_at": show_time(row["revoked_at"]),
        "last_used_at": show_time(row["last_used_at"]),
        "rotated_from": row["rotated_from"],
    }


def _read_new(body: KeyCreate, by: Identity) -> NewKey:
    return NewKey(
        name=check_text(body.name, "name") or "",
        # A key belongs to whoever made it, unless another owner is named.
        owner=check_text(body.owner, "owner") or by.actor,
        scopes=_read_scopes(body),
        role=body.role or "tenant",
        expires_at=None if body.expires_at is None else to_utc(body.expires_at, "expires_at"),
        limits=body.limits,
        priority=body.priority,
    )


def _check_overlap(overlap_s: int | None) -> int:
    if overlap_s is None:
        return DEFAULT_OVERLAP_S
    if not 0 <= overlap_s <= MAX_OVERLAP_S:
        raise InvalidRequestError(f"overlap_s is a whole number from 0 to {MAX_OVERLAP_S} (30 days)", param="overlap_s")
    return overlap_s


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
