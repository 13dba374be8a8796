"""Adapters: the list of all, one with its aliases and versions, one version with its report and its files."""

from __future__ import annotations

import re
from typing import Any

from litestar import Request, Response, get
from litestar.params import FromPath
from litestar.response import Stream

from loraplex.dashboard.adapter_act import find_previous, list_version_acts, may, name_targets
from loraplex.dashboard.adapter_row import MAX_ROWS, STATES, Filter, Traffic, TrafficKey, build_rows, read_traffic
from loraplex.dashboard.key_name import find_maker
from loraplex.dashboard.menu import Entry
from loraplex.dashboard.section import Desk, Section
from loraplex.dashboard.sign import Calls, Failing, describe_failing, find_worst
from loraplex.errors import NotFoundError
from loraplex.gateway.authentication import target
from loraplex.gateway.paging import read_query
from loraplex.gateway.permission import get_identity, require_scope
from loraplex.stats.report import StatsQuery
from loraplex_registry.wire.identity import Identity

READ, WRITE = "adapters:read", "adapters:write"
_USAGE = "usage:read"
_WINDOW_S = 3600
_NUM_VERSIONS = 50
_NUMBER = re.compile(r"[1-9][0-9]{0,18}")
_ADAPTER = "/ui/adapters/{tenant:str}/{adapter:str}"
_VERSION = _ADAPTER + "/versions/{number:str}"


def build_adapters(desk: Desk) -> Section:
    """Return the pages that show adapters."""
    entry = Entry("/ui/adapters", "Adapters", scope=READ)
    return Section(entries=[entry], handlers=[_build_list(desk), *_build_one(desk)])


def aim(desk: Desk, identity: Identity, tenant: str) -> Identity:
    """Return who asks, with a tenant as the target.

    Raises:
        NotFoundError: There is none that may be seen.
    """
    found = target(identity, tenant, desk.parts.directory)
    if found is None:
        raise NotFoundError("There is no such tenant, or it is not yours.", param="tenant")
    return found


def read_number(text: str) -> int:
    """Return the number of a version.

    Raises:
        NotFoundError: It is none.
    """
    if _NUMBER.fullmatch(text) is None:
        raise NotFoundError("There is no such version.", param="version")
    return int(text)


def _build_list(desk: Desk) -> Any:
    async def find_traffic(identity: Identity) -> dict[TrafficKey, Traffic] | None:
        if not identity.has_scope(_USAGE):
            return None
        tenant_id = None if identity.is_platform else identity.tenant_id
        query = StatsQuery(window_s=_WINDOW_S, by="adapter", tenant_id=tenant_id, has_spreads=False)
        return read_traffic(await desk.board.read(query))

    @get("/ui/adapters")
    async def show_list(request: Request[Any, Any, Any]) -> Response[str]:
        identity = require_scope(request, READ, WRITE)
        query = read_query(request, {"q", "state", "base"})
        wanted = Filter(text=query.get("q", ""), state=query.get("state", ""), base=query.get("base", ""))
        await desk.parts.names.ensure_fresh()
        tenants = None if identity.is_platform else (identity.tenant or "",)
        rows = build_rows(desk.parts.names.adapters(tenants), await find_traffic(identity))
        found = [row for row in rows if wanted.takes(row)]
        return desk.pages.show(
            request,
            "adapters.html",
            rows=found[:MAX_ROWS],
            num_found=len(found),
            num_all=len(rows),
            wanted=wanted,
            states=STATES,
            bases=sorted({row.base for row in rows}),
            has_traffic=identity.has_scope(_USAGE),
            can_write=identity.has_scope(WRITE),
        )

    return show_list


def _build_one(desk: Desk) -> list[Any]:
    console = desk.parts.adapters

    @get(_ADAPTER)
    async def show_adapter(request: Request[Any, Any, Any], tenant: FromPath[str], adapter: FromPath[str]) -> Any:
        by = aim(desk, get_identity(request), tenant)
        query = read_query(request, {"cursor"})
        found = await console.show(by, adapter)
        versions, cursor = await console.list_versions(by, adapter, _NUM_VERSIONS, query.get("cursor"))
        aliases = await console.list_aliases(by, adapter)
        changes = {alias.alias: await console.list_changes(by, adapter, alias.alias) for alias in aliases}
        calls, failing = await _judge(desk, by, found.tenant, adapter)
        return desk.pages.show(
            request,
            "adapter.html",
            adapter=found,
            aliases=aliases,
            changes=changes,
            previous={alias.alias: find_previous(alias, changes[alias.alias]) for alias in aliases},
            versions=versions,
            version_acts={version.version: list_version_acts(by, version) for version in versions},
            outcomes=calls,
            failing=None if failing is None else describe_failing(failing),
            maker=await find_maker(desk.parts, by, f"{found.tenant}/{adapter}@1", found.created_at),
            main_version=None if failing is None or failing.target == failing.main else failing.main.version,
            cursor=cursor,
            can_write=may(by, "promote"),
            can_infer=by.has_scope("infer"),
            name_targets=name_targets,
        )

    @get(_VERSION)
    async def show_version(
        request: Request[Any, Any, Any], tenant: FromPath[str], adapter: FromPath[str], number: FromPath[str]
    ) -> Any:
        by = aim(desk, get_identity(request), tenant)
        read_query(request, ())
        version, files = await console.show_version(by, adapter, read_number(number))
        aliases = await console.list_aliases(by, adapter)
        return desk.pages.show(
            request,
            "version.html",
            version=version,
            files=files,
            maker=await find_maker(
                desk.parts, by, f"{version.tenant}/{version.adapter}@{version.version}", version.created_at
            ),
            acts=list_version_acts(by, version),
            aliases=[one for one in aliases if any(t.version == version.version for t in one.targets)],
            can_download=by.has_scope(READ) and version.state != "purged",
            can_infer=by.has_scope("infer"),
        )

    @get(_VERSION + "/files/{name:str}")
    async def send_file(
        request: Request[Any, Any, Any],
        tenant: FromPath[str],
        adapter: FromPath[str],
        number: FromPath[str],
        name: FromPath[str],
    ) -> Stream:
        by = aim(desk, get_identity(request), tenant)
        read_query(request, ())
        return await console.open_file(by, adapter, read_number(number), name)

    return [show_adapter, show_version, send_file]


async def _judge(desk: Desk, by: Identity, tenant: str, adapter: str) -> tuple[dict[int, Calls], Failing | None]:
    """Return the calls of the last hour by version, what a canary is judged by, and the version that fails many."""
    await desk.parts.names.ensure_fresh()
    known = desk.parts.names.find_adapter(tenant, adapter)
    if known is None:
        return {}, None
    counted = await desk.lookout.count_calls(None if by.is_platform else by.tenant_id)
    calls = {number: found for (adapter_id, number), found in counted.items() if adapter_id == known.adapter_id}
    return calls, find_worst(known, counted)
