"""What was asked for before this gateway began, so that engines which begin with it are warmed by recent traffic."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import usage
from loraplex.fleet.traffic import HALF_LIFE_S, Traffic
from loraplex.gateway.names import NameIndex
from loraplex_registry.wire.adapter import VersionName

_REACH_S = 600.0
_MAX_ROWS = 5000


async def remember_traffic(database: Database, names: NameIndex, traffic: Traffic) -> None:
    """Count the requests of the last ten minutes, of all gateways, as if they had come then.

    Raises:
        LoraplexError: The database does not answer.
    """
    now = datetime.now(UTC)
    columns = (usage.c.base, usage.c.digest, usage.c.adapter_id, usage.c.version, usage.c.created_at)
    query = (
        sa.select(*columns)
        .where(usage.c.created_at > now - timedelta(seconds=_REACH_S))
        .order_by(usage.c.created_at.desc())
        .limit(_MAX_ROWS)
    )
    async with database.read() as connection:
        rows = (await connection.execute(query)).all()
    for base, digest, adapter_id, number, created_at in rows:
        version = _find_version(names, adapter_id, number)
        times = 0.5 ** (max(0.0, (now - created_at).total_seconds()) / HALF_LIFE_S)
        if digest is None:
            traffic.note(base, None, times=times)
        elif version is not None:
            traffic.note(base, digest, version.rank, weights=version.weights_digest, times=times)


def _find_version(names: NameIndex, adapter_id: str | None, number: int | None) -> VersionName | None:
    """A version that adapters' engines serve, None if there is none any more."""
    adapter = names.find_adapter_by_id(adapter_id) if adapter_id else None
    versions = () if adapter is None else adapter.versions
    return next((one for one in versions if one.number == number and one.pool is None), None)
