"""The faults of `loraplex up` under load: all in `make chaos`, none in `make test`, which has other tests for some."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from chaos_fault import Fault
from chaos_machine import MACHINE, MachineWorld
from chaos_run import run_fault
from small_disk import DiskUnavailable, small_disk

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.enable_socket]
DISK_BYTES = 32 << 20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_full = metafunc.config.getoption("--endure")
    metafunc.parametrize("fault", [one for one in MACHINE if is_full or one.is_sample], ids=str)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MachineWorld]:
    with ExitStack() as stack:
        disks: dict[str, Path] = {}
        try:
            disks = {name: stack.enter_context(small_disk(DISK_BYTES)) for name in ("data", "objects")}
        except DiskUnavailable:
            disks = {}
        world = MachineWorld(tmp_path_factory.mktemp("machine"), disks)
        try:
            await world.start()
            yield world
        finally:
            await world.stop()


async def test_fault(world: MachineWorld, fault: Fault) -> None:
    await run_fault(world, fault)
