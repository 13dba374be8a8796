"""The overview: the eight numbers, who causes them, and the fleet; live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.response import Stream

from loraplex.dashboard.fleet_table import describe_fleet
from loraplex.dashboard.live import Event
from loraplex.dashboard.menu import Entry
from loraplex.dashboard.section import Desk, Section
from loraplex.dashboard.tile import Charts, build_charts
from loraplex.dashboard.visit import get_visit
from loraplex.dashboard.window import WINDOWS, read_window
from loraplex.errors import InvalidRequestError
from loraplex.gateway.paging import read_query
from loraplex.gateway.permission import get_identity, require_scope
from loraplex.stats.report import WINDOW_TO_SECONDS, By, StatsQuery, StatsReport
from loraplex_registry.wire.identity import Identity

SCOPE = "usage:read"
_OVERVIEW = Entry("/ui/", "Overview")
_TRAFFIC = Entry("/ui/traffic", "Traffic", scope=SCOPE)
_PLATFORM_BYS: tuple[tuple[By, str], ...] = (
    ("tenant", "Tenant"),
    ("adapter", "Adapter"),
    ("base", "Base"),
    ("replica", "Replica"),
)
_TENANT_BYS: tuple[tuple[By, str], ...] = (("adapter", "Adapter"), ("base", "Base"))
_NUM_BUSIEST = 8
_PARTS = ("signs", "totals", "traffic")
_EVERY_S = {"1m": 2.0, "10m": 5.0, "1h": 15.0}


def build_overview(desk: Desk) -> Section:
    """Return the overview, the page of all traffic, and the stream of the first."""
    overview = _Overview(desk)
    return Section(
        entries=[_OVERVIEW, _TRAFFIC], handlers=[*_build_live(desk, overview), _build_traffic(desk, overview)]
    )


class _Overview:
    """What the overview shows, by whom it is for."""

    def __init__(self, desk: Desk) -> None:
        self._parts = desk.parts
        self._board = desk.board
        self._lookout = desk.lookout

    async def read(self, identity: Identity, window: str, by: By, *, has_series: bool = False) -> StatsReport:
        """Return the figures of all, or of the tenant that asks."""
        tenant_id = None if identity.is_platform else identity.tenant_id
        seconds = WINDOW_TO_SECONDS[window]
        return await self._board.read(StatsQuery(window_s=seconds, by=by, tenant_id=tenant_id, has_series=has_series))

    async def describe(self, identity: Identity, window: str) -> dict[str, Any]:
        """Return what the templates show: nothing of traffic to a key that may not read usage."""
        found: dict[str, Any] = {"charts": None, "fleet": None, "signs": None, "window": window}
        if identity.is_platform:
            found["fleet"] = describe_fleet(self._parts.fleet, self._parts.reconciler)
        if identity.has_scope(SCOPE):
            by: By = "tenant" if identity.is_platform else "adapter"
            report = await self.read(identity, window, by, has_series=True)
            charts = build_charts(report, has_engines=identity.is_platform)
            found |= {"charts": charts, "report": report, "by": by, "num_shown": _NUM_BUSIEST}
            found["signs"] = await self._lookout.look(identity, report, window, found["fleet"])
        return found


def _build_live(desk: Desk, overview: _Overview) -> list[Any]:
    pages = desk.pages

    @get("/ui")
    async def show_overview(request: Request[Any, Any, Any]) -> Response[str]:
        window = read_window(read_query(request, {"window"}).get("window"))
        context = await overview.describe(get_identity(request), window)
        return pages.show(request, "overview.html", windows=WINDOWS, encode=_encode, **context)

    @get("/ui/live/overview")
    async def follow_overview(request: Request[Any, Any, Any]) -> Stream:
        window = read_window(read_query(request, {"window"}).get("window"))

        async def make(identity: Identity) -> Sequence[Event]:
            context = await overview.describe(identity, window)
            events = []
            if context["charts"] is not None:
                events.append(Event("charts", _encode(context["charts"])))
                events += [Event(name, pages.render(f"_{name}.html", **context)) for name in _PARTS]
            if context["fleet"] is not None:
                events.append(Event("fleet", pages.render("_fleet.html", **context)))
            return events

        return desk.streams.open(get_visit(request), make, _EVERY_S[window])

    return [show_overview, follow_overview]


def _build_traffic(desk: Desk, overview: _Overview) -> Any:
    @get("/ui/traffic")
    async def show_traffic(request: Request[Any, Any, Any]) -> Response[str]:
        identity = require_scope(request, SCOPE)
        query = read_query(request, {"window", "by"})
        window = read_window(query.get("window"))
        bys = _PLATFORM_BYS if identity.is_platform else _TENANT_BYS
        by = _read_by(query.get("by"), bys)
        context: dict[str, Any] = {"report": await overview.read(identity, window, by), "by": by, "bys": bys}
        return desk.pages.show(request, "traffic.html", window=window, windows=WINDOWS, num_shown=None, **context)

    return show_traffic


def _read_by(text: str | None, bys: Sequence[tuple[By, str]]) -> By:
    if text is None:
        return bys[0][0]
    found = next((by for by, _ in bys if by == text), None)
    if found is None:
        raise InvalidRequestError(f"by is one of {', '.join(by for by, _ in bys)}", param="by")
    return found


def _encode(charts: Charts) -> str:
    return msgspec.json.encode(charts).decode()
