"""The audit: who did what to what, newest first, with filters and pages."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import msgspec
from litestar import Request, Response, get

from loraplex.audit.action import ACTIONS
from loraplex.dashboard.key_name import name_key
from loraplex.dashboard.menu import Entry
from loraplex.dashboard.section import Desk, Section
from loraplex.gateway.paging import read_query, take_page
from loraplex.gateway.permission import require_scope
from loraplex.gateway.routes.reports import EVENT_FILTERS, read_event_query, read_events

_SCOPE = "audit:read"
_FIELDS = ("tenant", "from", "to", *EVENT_FILTERS)


def build_audit(desk: Desk) -> Section:
    """Return the page."""
    parts = desk.parts

    @get("/ui/audit")
    async def show_audit(request: Request[Any, Any, Any]) -> Response[str]:
        identity = require_scope(request, _SCOPE)
        # what a form leaves empty it sends all the same
        given = {name: text.strip() for name, text in read_query(request, {"limit", "cursor", *_FIELDS}).items()}
        fields = {name: text for name, text in given.items() if text}
        page = take_page(fields)
        wanted = read_event_query(fields, identity, parts.directory)
        found = await read_events(parts.database, parts.fleet, page, wanted)
        older = found["next_cursor"] and f"/ui/audit?{urlencode(fields | {'cursor': found['next_cursor']})}"
        rows = [
            row | {"details": show_details(row["details"]), "key": name_key(parts.directory, row["key_id"], identity)}
            for row in found["data"]
        ]
        return desk.pages.show(
            request,
            "audit.html",
            rows=rows,
            fields=fields,
            older=older,
            actions=sorted(ACTIONS),
            is_older="cursor" in given,
        )

    return Section(entries=[Entry("/ui/audit", "Audit", scope=_SCOPE)], handlers=[show_audit])


def show_details(details: dict[str, Any]) -> str:
    """The details of an event as indented JSON, without what is not there; empty if nothing is left."""
    left = {name: value for name, value in details.items() if value is not None}
    return msgspec.json.format(msgspec.json.encode(left), indent=2).decode() if left else ""
