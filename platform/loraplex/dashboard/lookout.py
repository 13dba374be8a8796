"""Gathers what signs rest on, once every few seconds however many pages look."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from loraplex.dashboard.board import Board
from loraplex.dashboard.fleet_table import FleetTable
from loraplex.dashboard.memo import Memo
from loraplex.dashboard.parts import Parts
from loraplex.dashboard.sign import (
    Calls,
    Sign,
    Thrash,
    find_down,
    find_failing,
    find_overdue,
    find_queue,
    find_refused,
    list_thrash,
)
from loraplex.dashboard.slot_table import find_thrash
from loraplex.stats.report import StatsQuery, StatsReport
from loraplex.usage.outcomes import sum_outcomes
from loraplex.usage.report import count_loads
from loraplex_registry.wire.identity import Identity

SLOT_WINDOW_S = 600
_CALLS_S = 3600
_FRESH_S = 5.0
_MAX_LOADED = 8
_MAX_OVERDUE = 50
Counted = dict[tuple[str, int], Calls]


class Lookout:
    """Says what is wrong, to the platform or to one tenant."""

    def __init__(self, parts: Parts, board: Board) -> None:
        self._parts = parts
        self._board = board
        self._calls: Memo[str | None, Counted] = Memo(_FRESH_S)

    async def look(self, identity: Identity, report: StatsReport, window: str, fleet: FleetTable | None) -> list[Sign]:
        """Return the signs for whoever looks, bad ones first.

        Args:
            identity: Who looks.
            report: The requests of a window, of all by tenant, or of the tenant that looks.
            window: Which one.
            fleet: What a platform key may know.

        Raises:
            UnavailableError: The database does not answer.
        """
        parts = self._parts
        await parts.names.ensure_fresh()
        adapters = parts.names.adapters(None if identity.is_platform else (identity.tenant or "",))
        found = [
            *find_failing(adapters, await self.count_calls(None if identity.is_platform else identity.tenant_id)),
            *find_refused(adapters),
        ]
        if fleet is not None:
            num_left = sum(not one.is_repaired for one in fleet.differences)
            found = [
                *find_queue(report, window),
                *list_thrash(await self.find_thrashing()),
                *found,
                *find_down([(one.name, one.problem) for one in fleet.replicas], num_left),
                *find_overdue(await self._list_overdue(identity)),
            ]
        return sorted(found, key=lambda sign: sign.tone != "bad")

    async def count_calls(self, tenant_id: str | None) -> Counted:
        """Return the calls of the last hour by adapter id and version, of one tenant or all."""
        return await self._calls.get(tenant_id, lambda: self._count_calls(tenant_id))

    async def find_thrashing(self) -> Sequence[Thrash]:
        """Return the engines whose adapters push each other out, with those that were loaded most."""
        report = await self._board.read(StatsQuery(window_s=SLOT_WINDOW_S, by="replica"))
        counted = {row.replica: row.engines for row in report.rows}
        found = []
        for replica in self._parts.fleet.view.replicas:
            reason = find_thrash(replica.state, replica.num_slots, counted.get(replica.name))
            if reason is not None:
                since = datetime.now(UTC) - timedelta(seconds=SLOT_WINDOW_S)
                loaded = await count_loads(self._parts.database, since, replica.url, _MAX_LOADED)
                found.append(Thrash(replica.name, reason, loaded))
        return found

    async def _count_calls(self, tenant_id: str | None) -> Counted:
        stop = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
        rows = await sum_outcomes(self._parts.database, stop - timedelta(seconds=_CALLS_S), stop)
        names = self._parts.names
        return {
            (row["adapter_id"], row["version"]): Calls(row["requests"], row["error"] + row["lost"])
            for row in rows
            if (adapter := names.find_adapter_by_id(row["adapter_id"])) is not None
            and tenant_id in (None, adapter.tenant_id)
        }

    async def _list_overdue(self, identity: Identity) -> list[str]:
        found = await self._parts.escalations.list_all(identity, None, "overdue", None, _MAX_OVERDUE)
        return [f"{view.tenant}/{view.adapter}" for _, view in found]
