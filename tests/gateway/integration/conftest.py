"""What tests of the gateway's tables begin with."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from loraplex.db.database import Database
from loraplex.stats import recorder, report
from loraplex.stats.piece import PIECE_S
from loraplex.usage.ledger import Ledger


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """The database of a test, migrated."""
    opened = Database(database_url)
    yield opened
    await opened.close()


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of statistics stands in the middle of a piece: none ends by itself, and a few fit before now."""
    now = time.time() // PIECE_S * PIECE_S + PIECE_S / 2
    clock = SimpleNamespace(time=lambda: now)
    for module in (recorder, report):
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture
async def ledger(database: Database) -> AsyncIterator[Ledger]:
    """A ledger that writes; what is pending is written at the end."""
    started = Ledger(database)
    started.start()
    yield started
    await started.stop()
