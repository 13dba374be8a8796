"""What only a hand or half a backup can do to the database: versions gone from under the aliases that lead to them."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

_GUARD = "guard_adapter_version_targeted"


async def purge_by_hand(database_url: str, adapter: str, numbers: Sequence[int], state: str = "purged") -> None:
    """Make versions of an adapter purged although aliases lead to them; the database no longer minds."""
    engine = create_async_engine(database_url)
    is_sqlite = engine.dialect.name == "sqlite"
    drop = f"DROP TRIGGER IF EXISTS {_GUARD}" if is_sqlite else f"DROP FUNCTION IF EXISTS {_GUARD}() CASCADE"
    update = sa.text(
        "UPDATE adapter_version SET state = :state, retired_at = created_at WHERE number IN :numbers "
        "AND adapter_id IN (SELECT id FROM adapter WHERE name = :adapter)"
    ).bindparams(sa.bindparam("numbers", list(numbers), expanding=True), state=state, adapter=adapter)
    async with engine.begin() as connection:
        await connection.execute(sa.text(drop))
        await connection.execute(update)
    await engine.dispose()
