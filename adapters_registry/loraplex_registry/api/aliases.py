"""Routes of aliases; an alias's revision is its ETag."""

from __future__ import annotations

import msgspec
from litestar import Controller, Response, delete, get, post, put

from loraplex_registry.adapters.page import Page
from loraplex_registry.api.caller import SEE, WRITE, enter_tenant
from loraplex_registry.api.reading import read_json, read_page_order, read_precondition, read_query
from loraplex_registry.api.service import Call, Name, Work
from loraplex_registry.wire.adapter import AliasChangeView, AliasView, Target

_ALIAS = "/{alias:str}"


class NewTargets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an alias is to point."""

    targets: tuple[Target, ...]


class AliasRoutes(Controller):
    """`/api/v1/tenants/{tenant}/adapters/{adapter}/aliases`."""

    path = "/api/v1/tenants/{tenant:str}/adapters/{adapter:str}/aliases"

    @get()
    async def list_all(self, request: Call, services: Work, tenant: Name, adapter: Name) -> Page[AliasView]:
        """List all aliases that are set, by name; there are few, so this list has one page."""
        target, _ = enter_tenant(request, tenant, *SEE)
        read_query(request)
        return Page(await services.aliases.list(target, adapter), None)

    @get(_ALIAS)
    async def show(
        self, request: Call, services: Work, tenant: Name, adapter: Name, alias: Name
    ) -> Response[AliasView]:
        """Show one alias."""
        target, _ = enter_tenant(request, tenant, *SEE)
        read_query(request)
        return _answer(await services.aliases.get(target, adapter, alias))

    @put(_ALIAS)
    async def move(
        self, request: Call, services: Work, tenant: Name, adapter: Name, alias: Name
    ) -> Response[AliasView]:
        """Point an alias to versions, if it is still what the client has seen."""
        target, caller = enter_tenant(request, tenant, WRITE)
        read_query(request)
        seen = read_precondition(request)
        wanted = await read_json(request, NewTargets)
        view, is_new = await services.aliases.put(target, adapter, alias, wanted.targets, seen, caller)
        return _answer(view, 201 if is_new else 200)

    @delete(_ALIAS, status_code=204)
    async def remove(self, request: Call, services: Work, tenant: Name, adapter: Name, alias: Name) -> None:
        """Delete an alias."""
        target, caller = enter_tenant(request, tenant, WRITE)
        read_query(request)
        await services.aliases.delete(target, adapter, alias, read_precondition(request), caller)

    @post(_ALIAS + "/rollback", status_code=200)
    async def roll_back(
        self, request: Call, services: Work, tenant: Name, adapter: Name, alias: Name
    ) -> Response[AliasView]:
        """Point an alias to where it pointed before."""
        target, caller = enter_tenant(request, tenant, WRITE)
        read_query(request)
        return _answer(await services.aliases.roll_back(target, adapter, alias, read_precondition(request), caller))

    @get(_ALIAS + "/history")
    async def history(
        self, request: Call, services: Work, tenant: Name, adapter: Name, alias: Name
    ) -> Page[AliasChangeView]:
        """List what an alias pointed to, newest first."""
        target, _ = enter_tenant(request, tenant, *SEE)
        return await services.aliases.history(target, adapter, alias, read_page_order(request))


def _answer(view: AliasView, status: int = 200) -> Response[AliasView]:
    return Response(view, status_code=status, headers={"ETag": f'"{view.revision}"'})
