"""Purges what was retired or deleted long ago: the row stays as `purged`, for its number and its digest.

Only rows change here. The sweeper of the store removes the bytes, once no version of any tenant refers to them: when
a version is purged tells nothing of who else has the same content.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from loraplex_registry.adapters import version_state
from loraplex_registry.adapters.agent import build_agent
from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import AdapterRow, VersionRow
from loraplex_registry.errors import RegistryError
from loraplex_registry.settings import RegistrySettings

_MAX_AT_ONCE = 100
"""Versions purged in one transaction, which holds the lock on names."""

_ACTOR = "retention"
_log = logging.getLogger(__name__)


class Retention:
    """Purges now and then until cancelled."""

    def __init__(self, database: Database, settings: RegistrySettings) -> None:
        self._database = database
        self._settings = settings

    async def run(self) -> None:
        """Purge for ever; a pass that fails is logged and the next one tries again."""
        while True:
            try:
                await self.purge()
            except RegistryError as error:
                _log.warning("retired versions could not be purged: %s", error)
            await asyncio.sleep(self._settings.sweep_interval_s)

    async def purge(self) -> int:
        """Purge every version whose time is over, oldest first, and return how many there were.

        Raises:
            UnavailableError: The database does not answer.
        """
        before = datetime.now(UTC) - timedelta(days=self._settings.purge_after_days)
        num_purged = 0
        while await self._is_any_over(before):
            num_purged += await self._database.change(lambda change: _purge_some(change, before))
        return num_purged

    async def _is_any_over(self, before: datetime) -> bool:
        """Whether there is work: every change of names makes all gateways read them anew."""
        async with self._database.read() as session:
            found = await session.execute(_select_over(before).with_only_columns(VersionRow.id).limit(1))
            return found.first() is not None


async def _purge_some(change: Change, before: datetime) -> int:
    by = build_agent(_ACTOR)
    query = _select_over(before).order_by(VersionRow.id).limit(_MAX_AT_ONCE)
    versions = (await change.session.execute(query)).scalars().all()
    for version in versions:
        version_state.purge(change, version, by)
    return len(versions)


def _select_over(before: datetime) -> sa.Select[VersionRow]:
    """Versions retired before an instant, and all of adapters that were deleted before it: quarantined ones, too."""
    is_retired = sa.and_(VersionRow.state == "retired", VersionRow.retired_at <= before)
    is_deleted = sa.and_(VersionRow.state != "purged", AdapterRow.deleted_at <= before)
    return (
        sa.select(VersionRow)
        .join(AdapterRow, AdapterRow.id == VersionRow.adapter_id)
        .where(sa.or_(is_retired, is_deleted))
    )
