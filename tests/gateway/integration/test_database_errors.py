"""What a database refuses is told without what was to be written: errors go into logs."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from loraplex.db import database as platform_database
from loraplex_registry.db import database as registry_database

SECRET = "what a client calls itself"


@pytest.mark.parametrize("module", [platform_database, registry_database], ids=["platform", "registry"])
async def test_an_error_does_not_hold_what_was_to_be_written(module: object, database_url: str) -> None:
    engine = module.create_engine(database_url)  # type: ignore[attr-defined]
    insert = sa.text("INSERT INTO gateway_epoch (id, epoch) VALUES (:id, :secret)")
    with pytest.raises(sa.exc.DBAPIError) as caught:
        async with engine.begin() as connection:
            await connection.execute(insert, {"id": 2, "secret": SECRET})
    await engine.dispose()
    _, _, statement = str(caught.value).partition("[SQL:")
    assert "gateway_epoch" in statement
    assert SECRET not in statement
