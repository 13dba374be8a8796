"""What tests of the gateway's tables begin with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from loraplex.db.database import Database
from loraplex.usage.ledger import Ledger


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """The database of a test, migrated."""
    opened = Database(database_url)
    yield opened
    await opened.close()


@pytest.fixture
async def ledger(database: Database) -> AsyncIterator[Ledger]:
    """A ledger that writes; what is pending is written at the end."""
    started = Ledger(database)
    started.start()
    yield started
    await started.stop()
