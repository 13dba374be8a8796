"""The gateway's half of the names epoch: a number that each committed change of a tenant or key raises."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from loraplex.db.tables import gateway_epoch


async def bump_epoch(connection: AsyncConnection) -> int:
    """Raise the epoch inside the caller's transaction and return it.

    The row lock serialises writers, so commits become visible in the order of their epochs.
    """
    raised = (
        sa.update(gateway_epoch)
        .where(gateway_epoch.c.id == 1)
        .values(epoch=gateway_epoch.c.epoch + 1)
        .returning(gateway_epoch.c.epoch)
    )
    return int((await connection.execute(raised)).scalar_one())
