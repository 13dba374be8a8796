"""When keys were last used: noted by requests, written behind them, by each gateway at most once a minute."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from loraplex.db.database import Database
from loraplex.db.tables import api_key
from loraplex.errors import UnavailableError
from loraplex.keys import last_use
from loraplex.keys.last_use import LastUse
from loraplex.keys.service import KeyService, NewKey
from loraplex.tenants.service import TenantService
from loraplex_registry.wire.identity import Identity

ADMIN = Identity(role="admin", tenant_id=None, tenant=None, scopes=(), key_id="k", actor="ada", request_id="r")


async def create_key(database: Database, tenant_id: uuid.UUID) -> str:
    new = NewKey(name="k", owner="o", scopes=["infer"], role="tenant", expires_at=None)
    row, _ = await KeyService(database, b"pepper").create_key(ADMIN, tenant_id, "team-x", new)
    key_id: str = row["public_id"]
    return key_id


async def read(database: Database) -> dict[str, datetime | None]:
    async with database.read() as connection:
        rows = await connection.execute(sa.select(api_key.c.public_id, api_key.c.last_used_at))
        return {row.public_id: row.last_used_at for row in rows}


async def test_a_use_is_written_behind_the_request_and_not_again_within_the_minute(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await TenantService(database).create_tenant(ADMIN, "team-x", None, None, None)
    first, second = [await create_key(database, tenant["id"]) for _ in range(2)]
    uses, elsewhere = LastUse(database), LastUse(database)
    uses.note(first)
    assert await read(database) == {first: None, second: None}
    await uses.flush()
    at = (await read(database))[first]
    assert at is not None
    assert timedelta(0) <= datetime.now(UTC) - at < timedelta(seconds=10)
    for gateway in (uses, elsewhere):
        gateway.note(first)
        await gateway.flush()
    assert await read(database) == {first: at, second: None}
    monkeypatch.setattr(last_use, "_REST_S", 0.0)
    await uses.flush()
    later = (await read(database))[first]
    assert later is not None
    assert later > at


async def test_the_use_of_one_key_is_no_change_of_keys(database: Database) -> None:
    tenant = await TenantService(database).create_tenant(ADMIN, "team-x", None, None, None)
    key_id = await create_key(database, tenant["id"])
    async with database.read() as connection:
        before = (await connection.execute(sa.select(api_key.c.changed_epoch))).scalar_one()
    uses = LastUse(database)
    uses.note(key_id)
    uses.note("gateway")
    await uses.flush()
    async with database.read() as connection:
        assert (await connection.execute(sa.select(api_key.c.changed_epoch))).scalar_one() == before


async def test_what_cannot_be_written_is_written_later(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = await TenantService(database).create_tenant(ADMIN, "team-x", None, None, None)
    key_id = await create_key(database, tenant["id"])
    uses = LastUse(database)
    uses.note(key_id)

    def fail() -> None:
        raise UnavailableError

    with monkeypatch.context() as away:
        away.setattr(database, "write", fail)
        await uses.flush()
    assert (await read(database))[key_id] is None
    await uses.flush()
    assert (await read(database))[key_id] is not None
