"""The operation on statistics, and what it answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from loraplex.openapi.operation import Answer, Operation, Parameter
from loraplex.openapi.parameter import OF_TENANT
from loraplex.openapi.schema import FLAG, TIME, Schema, ref
from loraplex.stats.report import BYS, WINDOW_TO_SECONDS
from loraplex.wire.stats import StatsPoint, StatsRow

_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 100}


class Stats(msgspec.Struct, rename={"start": "from", "stop": "to"}):
    """Rows with most requests first, all of them together, and points of `step_s` seconds if they were asked for."""

    window: Literal["1m", "10m", "1h"]
    by: Literal["base", "tenant", "adapter", "replica"]
    start: str
    stop: str
    data: list[StatsRow]
    total: StatsRow
    step_s: int
    series: list[StatsPoint] | None
    next_cursor: None


STATS_MESSAGES: tuple[type[msgspec.Struct], ...] = (Stats,)
STATS_REFINED: dict[str, dict[str, Schema]] = {"Stats": {"from": TIME, "to": TIME}}

STATS: tuple[Operation, ...] = (
    Operation(
        method="get",
        path="/api/v1/stats",
        name="readStats",
        tag="reports",
        summary="Read waits, times and engine loads of the last minute, ten minutes or hour",
        answers=(Answer(200, "The window by rows, in total, and as it went", ref("Stats")),),
        codes=("not_found",),
        parameters=(
            Parameter("window", "query", {"enum": list(WINDOW_TO_SECONDS), "default": "10m"}),
            Parameter("by", "query", {"enum": list(BYS), "default": "base"}, "What each row is of"),
            Parameter("series", "query", FLAG, "Whether to tell how the window went"),
            OF_TENANT,
            *(Parameter(name, "query", _NAME) for name in ("base", "adapter", "replica")),
        ),
    ),
)
