"""What a Loraplex platform wrote down of a stretch of time: each request's wait for its turn and its prefill.

A gateway does not pass on its engines' histograms, but its usage has both for every request that this key may see.
"""

from __future__ import annotations

import time
from datetime import datetime

from loraplex.bench.client import Server
from loraplex.bench.figure import Spread, spread
from loraplex.client.connection import Connection
from loraplex.client.errors import ClientError
from loraplex.client.location import Location
from loraplex.client.management import Management

_COLUMNS = {"queue": "queue_s", "prefill": "prefill_s"}
_MAX_ROWS = 5000
_TRIES, _PAUSE_S = 5, 0.2


def find_platform_times(server: Server, start: datetime, stop: datetime, num_ok: int) -> dict[str, Spread]:
    """Return the spreads between two moments by the server's clock; nothing where it keeps no such rows.

    Waits a second at most for the rows of requests that have just ended.
    """
    within = {"from": start.isoformat(), "to": stop.isoformat()}
    with Connection(Location(server.url, server.key or None, is_direct=True)) as connection:
        for _ in range(_TRIES):
            try:
                rows = Management(connection).list_usage_rows(_MAX_ROWS, outcome="ok", **within)
            except ClientError:
                return {}
            if len(rows) >= min(num_ok, _MAX_ROWS):
                break
            time.sleep(_PAUSE_S)
    told = {kind: [float(row[name]) for row in rows if row.get(name) is not None] for kind, name in _COLUMNS.items()}
    return {kind: spread(values) for kind, values in told.items() if values}
