"""The slots of all engines: which adapter sits where, what holds it, and whether adapters push each other out; live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import Request, Response, get
from litestar.response import Stream

from loraplex.dashboard.live import Event
from loraplex.dashboard.lookout import SLOT_WINDOW_S
from loraplex.dashboard.menu import Entry
from loraplex.dashboard.section import Desk, Section
from loraplex.dashboard.slot_table import ReplicaSlots, describe_slots
from loraplex.dashboard.visit import get_visit
from loraplex.gateway.paging import read_query
from loraplex.gateway.permission import require_platform
from loraplex.stats.report import StatsQuery
from loraplex_registry.wire.identity import Identity

_EVERY_S = 2.0


def build_slots(desk: Desk) -> Section:
    """Return the page and its stream."""
    parts, pages = desk.parts, desk.pages

    async def describe() -> list[ReplicaSlots]:
        await parts.names.ensure_fresh()
        report = await desk.board.read(StatsQuery(window_s=SLOT_WINDOW_S, by="replica"))
        loaded = {one.replica: one.loaded for one in await desk.lookout.find_thrashing()}
        return describe_slots(parts.fleet, parts.names, report, loaded)

    @get("/ui/slots")
    async def show_slots(request: Request[Any, Any, Any]) -> Response[str]:
        require_platform(request)
        read_query(request, ())
        return pages.show(request, "slots.html", replicas=await describe())

    @get("/ui/live/slots")
    async def follow_slots(request: Request[Any, Any, Any]) -> Stream:
        require_platform(request)

        async def make(_: Identity) -> Sequence[Event]:
            return [Event("slots", pages.render("_slots.html", replicas=await describe()))]

        return desk.streams.open(get_visit(request), make, _EVERY_S)

    return Section(entries=[Entry("/ui/slots", "Slots", scope="platform")], handlers=[show_slots, follow_slots])
