"""Figures that many look at: read once every few seconds, however many pages are open."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from loraplex.db.database import Database
from loraplex.stats.recorder import StatsRecorder
from loraplex.stats.report import StatsQuery, StatsReport, read_stats

_FRESH_S = 3.0
_MAX_REPORTS = 64


class Board:
    """Reports of the last seconds, by what was asked; who asks meanwhile waits for the same answer."""

    def __init__(self, database: Database, recorder: StatsRecorder) -> None:
        self._database = database
        self._recorder = recorder
        self._reports: OrderedDict[StatsQuery, tuple[float, asyncio.Task[StatsReport]]] = OrderedDict()

    async def read(self, query: StatsQuery) -> StatsReport:
        """Return a report that is a few seconds old at most.

        Raises:
            UnavailableError: The database does not answer.
        """
        read_at, task = self._reports.get(query, (0.0, None))
        if task is None or time.monotonic() - read_at > _FRESH_S:
            task = asyncio.create_task(read_stats(self._database, query, self._recorder.fresh()))
            self._reports[query] = time.monotonic(), task
            self._reports.move_to_end(query)
            while len(self._reports) > _MAX_REPORTS:
                self._reports.popitem(last=False)
        # one page that is closed takes the answer from no other
        return await asyncio.shield(task)
