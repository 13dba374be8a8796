"""Background tasks end, whatever libraries make of a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from loraplex_registry.wire import ending
from loraplex_registry.wire.ending import end_tasks


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_PATIENCE_S", 0.05)


async def run_for_ever(num_missed: int) -> None:
    """A loop whose library takes so many cancellations for answers."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            num_missed -= 1
            if num_missed < 0:
                raise


async def fail() -> None:
    raise ValueError("planted")


async def begin(*works: object) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(work) for work in works]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("num_missed", [0, 1, 3])
async def test_a_task_that_misses_cancellations_ends(num_missed: int) -> None:
    tasks = await begin(run_for_ever(num_missed), run_for_ever(0), fail())
    async with asyncio.timeout(5):
        await end_tasks(tasks)
    assert all(task.done() for task in tasks)


async def test_one_that_never_ends_is_named_and_left(caplog: pytest.LogCaptureFixture) -> None:
    (task,) = await begin(run_for_ever(100))
    task.set_name("stubborn")
    async with asyncio.timeout(5):
        await end_tasks([task])
    assert not task.done()
    assert caplog.messages == ["tasks do not end: stubborn"]
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


async def test_nothing_to_end_is_fine() -> None:
    await end_tasks([])


async def test_a_task_may_tidy_up() -> None:
    tidied = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            tidied.append(True)

    await end_tasks(await begin(work()))
    assert tidied == [True]
