"""Every fault under load: nothing acknowledged lost, no wrong adapter, no base in its place, every wait bounded.

`make test` runs a sample; `make chaos` runs all and writes the table in `docs/chaos.md`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from chaos_fault import Fault
from chaos_page import list_fleet_faults
from chaos_run import run_fault
from chaos_world import ChaosWorld
from clock_shim import Clock, ClockUnavailable
from conftest import skip_or_fail, upgrade_to_head
from databases import EmbeddedPostgres, Unavailable
from redis_world import RedisUnavailable, running_redis
from s3_world import S3Unavailable, running_s3
from small_disk import DiskUnavailable, small_disk

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.enable_socket]
CACHE_DISK_BYTES = 16 << 20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--endure")
        metafunc.parametrize("fault", [one for one in list_fleet_faults() if is_full or one.is_sample], ids=str)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosWorld]:
    folder = tmp_path_factory.mktemp("chaos")
    with ExitStack() as stack:
        try:
            postgres = EmbeddedPostgres(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lpx-pg-"))))
            postgres.start()
            stack.callback(postgres.stop)
        except Unavailable as reason:
            skip_or_fail("postgres", str(reason))
        try:
            redis = stack.enter_context(running_redis())
        except RedisUnavailable as reason:
            skip_or_fail("redis", str(reason))
        try:
            s3 = stack.enter_context(running_s3())
        except S3Unavailable as reason:
            skip_or_fail("s3", str(reason))
        tools: dict[str, Any] = {}
        with suppress(DiskUnavailable):
            tools["cache"] = stack.enter_context(small_disk(CACHE_DISK_BYTES))
        with suppress(ClockUnavailable):
            tools["clock"] = Clock(folder)
        world = ChaosWorld(folder, postgres, redis, s3)
        await asyncio.to_thread(upgrade_to_head, world.database_url)
        try:
            await world.start(tools)
            yield world
        finally:
            await world.stop()


async def test_fault(world: ChaosWorld, fault: Fault) -> None:
    await run_fault(world, fault)
