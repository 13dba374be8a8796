"""What the platform itself knows of an adapter that is to be escalated: how it was called in the last 30 days."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import usage

_SPAN = timedelta(days=30)


async def read_traffic(database: Database, tenant_id: str, adapter_id: str, now: datetime) -> dict[str, Any]:
    """Return the adapter's requests and tokens of 30 days, and its share of all tokens of the platform.

    Raises:
        UnavailableError: The database does not answer.
    """
    since = now - _SPAN
    tokens = usage.c.prompt_tokens + usage.c.completion_tokens
    sums = sa.select(
        sa.func.count(),
        sa.func.count().filter(usage.c.outcome == "ok"),
        sa.func.coalesce(sa.func.sum(usage.c.prompt_tokens), 0),
        sa.func.coalesce(sa.func.sum(usage.c.completion_tokens), 0),
    ).where(usage.c.tenant_id == tenant_id, usage.c.adapter_id == adapter_id, usage.c.created_at >= since)
    whole = sa.select(sa.func.coalesce(sa.func.sum(tokens), 0)).where(usage.c.created_at >= since)
    async with database.read() as connection:
        num_requests, num_ok, prompt_tokens, completion_tokens = (await connection.execute(sums)).one()
        all_tokens = int((await connection.execute(whole)).scalar_one())
    own_tokens = int(prompt_tokens) + int(completion_tokens)
    return {
        "days": _SPAN.days,
        "requests": num_requests,
        "requests_ok": num_ok,
        "prompt_tokens": int(prompt_tokens),
        "completion_tokens": int(completion_tokens),
        "share_of_tokens": round(own_tokens / all_tokens, 6) if all_tokens else 0.0,
    }
