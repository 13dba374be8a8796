"""Who reads reports, and be it without end, takes no connection from those who call."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa

from gateway_world import BASE, check_error, running_world
from loraplex.db import database as database_module
from loraplex.db.database import DEFAULT_POOL_SIZE, REPORT_SHARE, Database

REPORTS = (
    "/api/v1/usage",
    "/api/v1/usage/requests",
    "/api/v1/audit",
    "/api/v1/stats?window=1h",
    "/api/v1/tenants/team-x/adapters/default/outcomes",
)


async def test_reports_take_turns_and_leave_connections_to_all_else(database_url: str) -> None:
    database = Database(database_url, REPORT_SHARE)

    async def read_report() -> int:
        async with database.report() as connection:
            return int((await connection.execute(sa.text("SELECT 1"))).scalar_one())

    async with database.report():
        waiting = [asyncio.create_task(read_report()) for _ in range(2 * REPORT_SHARE)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        async with database.read() as connection:
            assert (await connection.execute(sa.text("SELECT 1"))).scalar_one() == 1
    assert set(await asyncio.gather(*waiting)) == {1}
    await database.close()


@pytest.mark.parametrize("dialect", ["sqlite"])
async def test_calls_are_answered_while_reports_have_no_place(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "_REPORT_WAIT_S", 0.05)
    async with running_world(database_url, tmp_path) as world, AsyncExitStack() as stack:
        await world.create_tenant("team-x")
        await world.push("team-x")
        key = await world.create_key("team-x", scopes=["infer", "usage:read", "audit:read", "adapters:read"])
        for _ in range(DEFAULT_POOL_SIZE // REPORT_SHARE):
            await stack.enter_async_context(world.gateway.database.report())
        for path in REPORTS:
            check_error(await world.call("GET", path, key=key), 503, "unavailable")
        for model in ("team-x", BASE):
            assert (await world.complete(model, "answer", key)).status_code == 200
        await stack.aclose()
        for path in REPORTS:
            assert (await world.call("GET", path, key=key)).status_code == 200
