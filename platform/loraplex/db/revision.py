"""Whether the database's schema serves this program; the migrations keep the list of programs that it serves."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError

from loraplex.db.database import Database
from loraplex.errors import DatabaseRevisionError, UnavailableError

REVISION = "0012_quota_debts"
"""The newest migration that this program knows; newer ones that break nothing serve it too."""

_NO_TABLE = "no such table"
_SERVED = sa.text("SELECT revision FROM compatible_revision WHERE revision = :revision")
_CURRENT = sa.text("SELECT version_num FROM alembic_version")


async def check_revision(database: Database) -> None:
    """Refuse to run on a schema that is older than this program or that left it behind.

    Raises:
        DatabaseRevisionError: It is; the message says what to run.
        UnavailableError: The database does not answer.
    """
    if await _find(database, _SERVED, revision=REVISION) is not None:
        return
    found = await _find(database, _CURRENT)
    # their names begin with their numbers
    if found is not None and found > REVISION:
        raise DatabaseRevisionError(
            f"The database is at revision {found}, which no longer serves this program, of {REVISION}; use the release "
            "that migrated it, or a newer one"
        )
    raise DatabaseRevisionError(
        f"The database is at revision {found or 'none'}, this program needs {REVISION}; run: loraplex db upgrade"
    )


async def _find(database: Database, query: sa.TextClause, **values: str) -> str | None:
    try:
        async with database.read() as connection:
            return (await connection.execute(query, values)).scalar()
    except ProgrammingError:
        return None
    except UnavailableError as error:
        # SQLite reports a missing table with the class of a database that does not answer.
        if _NO_TABLE not in str(error.__cause__):
            raise
        return None
