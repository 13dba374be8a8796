"""Whether the database's schema serves this program; the migrations keep the list of programs that it serves."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError

from loraplex.db.database import Database
from loraplex.errors import DatabaseRevisionError, UnavailableError

REVISION = "0012_quota_debts"
"""The newest migration that this program knows; newer ones that break nothing serve it too."""

_NO_TABLE = "no such table"


async def check_revision(database: Database) -> None:
    """Refuse to run on a schema that is older than this program or that left it behind.

    Raises:
        DatabaseRevisionError: It is; the message says what to run.
        UnavailableError: The database does not answer.
    """
    served = sa.text("SELECT 1 FROM compatible_revision WHERE revision = :revision")
    try:
        async with database.read() as connection:
            is_served = (await connection.execute(served, {"revision": REVISION})).first() is not None
    except ProgrammingError:
        is_served = False
    except UnavailableError as error:
        # SQLite reports a missing table with the class of a database that does not answer.
        if _NO_TABLE not in str(error.__cause__):
            raise
        is_served = False
    if not is_served:
        raise DatabaseRevisionError(
            f"The database does not serve this program, which needs revision {REVISION}; run: loraplex db upgrade"
        )
