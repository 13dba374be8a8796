"""Figures that many look at: read once every few seconds, however many pages are open."""

from __future__ import annotations

from loraplex.dashboard.memo import Memo
from loraplex.db.database import Database
from loraplex.stats.recorder import StatsRecorder
from loraplex.stats.report import StatsQuery, StatsReport, read_stats

_FRESH_S = 3.0


class Board:
    """Reports of the last seconds, by what was asked."""

    def __init__(self, database: Database, recorder: StatsRecorder) -> None:
        self._database = database
        self._recorder = recorder
        self._reports: Memo[StatsQuery, StatsReport] = Memo(_FRESH_S)

    async def read(self, query: StatsQuery) -> StatsReport:
        """Return a report that is a few seconds old at most.

        Raises:
            UnavailableError: The database does not answer.
        """
        return await self._reports.get(query, lambda: read_stats(self._database, query, self._recorder.fresh()))
