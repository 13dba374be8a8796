"""How much was used since an instant: where counts of days and months begin that nobody has."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import usage


async def count_tokens_used(
    database: Database,
    column: Literal["tenant_id", "key_id", "adapter_id"],
    values: Sequence[str],
    since: datetime,
    tenant_id: str | None = None,
) -> int:
    """Return the tokens of prompts and answers that were settled of requests since an instant.

    Args:
        database: Has the rows.
        column: What they have in common.
        values: What they have there: one of these.
        since: The instant.
        tenant_id: The tenant whose they all are, which makes it faster; None is not known.

    Raises:
        UnavailableError: The database does not answer.
    """
    query = sa.select(sa.func.coalesce(sa.func.sum(usage.c.prompt_tokens + usage.c.completion_tokens), 0)).where(
        usage.c[column].in_(values), usage.c.created_at >= since
    )
    if tenant_id is not None:
        query = query.where(usage.c.tenant_id == tenant_id)
    async with database.read() as connection:
        return int((await connection.execute(query)).scalar_one())
