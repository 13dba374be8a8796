"""The gateway's half of the names epoch: a number that each committed change of a tenant or key raises."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.database import RAISED_EPOCH, Database
from loraplex.db.tables import gateway_epoch


async def bump_epoch(connection: AsyncConnection) -> int:
    """Raise the epoch inside the caller's transaction of `Database.write`, which publishes it, and return it.

    The row lock serialises writers, so commits become visible in the order of their epochs.
    """
    raised = (
        sa.update(gateway_epoch)
        .where(gateway_epoch.c.id == 1)
        .values(epoch=gateway_epoch.c.epoch + 1)
        .returning(gateway_epoch.c.epoch)
    )
    epoch = int((await connection.execute(raised)).scalar_one())
    (await connection.get_raw_connection()).info[RAISED_EPOCH] = epoch
    return epoch


async def read_epoch(database: Database) -> int:
    """Return the epoch that is committed.

    Raises:
        UnavailableError: The database does not answer.
    """
    async with database.read() as connection:
        return int((await connection.execute(sa.select(gateway_epoch.c.epoch))).scalar_one())
