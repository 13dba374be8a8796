"""/api/v1/stats: the numbers to steer by, of the last minute, ten minutes or hour."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from litestar import Request, Router, get

from loraplex.db.database import Database
from loraplex.errors import InvalidRequestError
from loraplex.gateway.directory import Directory
from loraplex.gateway.paging import read_query, show_time
from loraplex.gateway.permission import require_scope
from loraplex.gateway.routes.usage import read_tenant_id
from loraplex.stats.recorder import StatsRecorder
from loraplex.stats.report import BYS, WINDOW_TO_SECONDS, By, StatsQuery, read_stats
from loraplex.wire.stats import Quantiles
from loraplex_registry.wire.identity import Identity

_SCOPE = "usage:read"
_FILTERS = ("base", "adapter", "replica")
_FLAGS = {"true": True, "false": False}
_DIGITS = 6
_MAX_NAME_LEN = 100


def build_stats_router(database: Database, directory: Directory, recorder: StatsRecorder) -> Router:
    """Return the route over what gateways recorded, `recorder` being this one's."""

    @get("/stats")
    async def show_stats(request: Request[Any, Any, Any]) -> dict[str, Any]:
        identity = require_scope(request, _SCOPE)
        query = read_query(request, {"window", "by", "series", "tenant", *_FILTERS})
        window = _choose(query, "window", "10m", WINDOW_TO_SECONDS)
        asked = _read_stats_query(query, WINDOW_TO_SECONDS[window], identity, directory)
        report = await read_stats(database, asked, recorder.fresh())
        shown: dict[str, Any] = {
            "window": window,
            "by": report.by,
            "from": show_time(report.start),
            "to": show_time(report.stop),
            "data": _show(report.rows),
            "total": _show(report.total),
            "step_s": report.step_s,
            "series": _show(report.series) if asked.has_series else None,
            "next_cursor": None,
        }
        return shown

    return Router("/api/v1", route_handlers=[show_stats])


def _read_stats_query(query: dict[str, str], window_s: int, identity: Identity, directory: Directory) -> StatsQuery:
    for name in _FILTERS:
        if not 0 < len(query.get(name, "x")) <= _MAX_NAME_LEN:
            raise InvalidRequestError(f"{name} is 1 to {_MAX_NAME_LEN} characters", param=name)
    return StatsQuery(
        window_s=window_s,
        by=cast("By", _choose(query, "by", "base", BYS)),
        tenant_id=read_tenant_id(query.get("tenant"), identity, directory),
        base=query.get("base"),
        adapter=query.get("adapter"),
        replica=query.get("replica"),
        has_series=_FLAGS[_choose(query, "series", "false", _FLAGS)],
    )


def _choose(query: dict[str, str], name: str, default: str, known: Any) -> str:
    chosen = query.get(name, default)
    if chosen not in known:
        raise InvalidRequestError(f"{name} is one of {', '.join(known)}", param=name)
    return chosen


def _show(found: Any) -> Any:
    """As JSON: times as everywhere, numbers without digits that mean nothing."""
    if isinstance(found, list):
        return [_show(one) for one in found]
    if isinstance(found, Quantiles):
        return {name: round(value, _DIGITS) for name, value in msgspec.structs.asdict(found).items()}
    if isinstance(found, msgspec.Struct):
        return {name: _show(value) for name, value in msgspec.structs.asdict(found).items()}
    if isinstance(found, float):
        return round(found, _DIGITS)
    return show_time(found) if hasattr(found, "astimezone") else found
