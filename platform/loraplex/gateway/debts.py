"""Debts of days and months as rows: what usage does not say, since it does not know what the limits were.

`DebtRows` is the only writer of `quota_debt`. A row is written only when an answer has cost more than was left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.statement import Statement
from loraplex.db.tables import quota_debt
from loraplex.quotas.quota import Debt, Quota

_COLUMNS = ("period", "carried", "owed", "at_ms")


def _build_write(dialect: Any) -> Any:
    insert = dialect.insert(quota_debt)
    newer = insert.excluded.at_ms >= quota_debt.c.at_ms
    return insert.on_conflict_do_update(
        index_elements=["quota"], set_={name: insert.excluded[name] for name in _COLUMNS}, where=newer
    )


_WRITE = Statement(_build_write)


class DebtRows:
    """Keeps debts in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def save(self, debts: Sequence[Debt]) -> None:
        """Keep debts, in place of older ones of their quotas.

        Raises:
            UnavailableError: The database does not answer.
        """
        values = [{"quota": debt.quota.name, **{name: getattr(debt, name) for name in _COLUMNS}} for debt in debts]
        await self._database.transact(lambda transaction: transaction.run(_WRITE, values))

    async def find(self, quota: Quota) -> Debt | None:
        """Return the last debt of a quota that was kept. Raises as `save`."""
        query = sa.select(*(quota_debt.c[name] for name in _COLUMNS)).where(quota_debt.c.quota == quota.name)
        async with self._database.read() as connection:
            row = (await connection.execute(query)).mappings().one_or_none()
        return None if row is None else Debt(quota=quota, **row)
