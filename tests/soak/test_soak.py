"""Many adapters, few slots, every sort of request and change for a quarter of an hour: nothing grows, all is right.

`make test` runs some seconds of it, which judge the answers and what is left at the end; `make soak` runs SOAK_S
seconds, judges the slopes too and writes a report.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import sqlalchemy as sa

from chaos_base import list_held
from chaos_books import GONE, Books, count_ends
from chaos_checks import Since, check_answers, check_kept, check_rows
from chaos_clients import Pace
from chaos_machine import MachineWorld
from soak_samples import Sampler, show

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.enable_socket]
SOAK_S = float(os.environ.get("LORAPLEX_TEST_SOAK_S", "0"))
SAMPLE_S = 5.0
MOST_S = 60.0
NUM_ADAPTERS = 24 if SOAK_S else 6
NUM_SLOTS = 4
NUM_SAMPLES = 180
OPEN_ROWS = {
    "rows of open requests": "SELECT count(*) FROM request WHERE settled_at IS NULL",
    "rows of open uploads": "SELECT count(*) FROM adapter_upload WHERE state IN ('open', 'completing')",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MachineWorld]:
    flags = ("--max-loras", str(NUM_SLOTS), "--max-cpu-loras", str(NUM_SLOTS + 2))
    world = MachineWorld(tmp_path_factory.mktemp("soak"), {}, flags)
    try:
        await world.start(NUM_ADAPTERS - 2)
        world.clients.pace = Pace(
            num_clients=6, move_s=1.0, upload_s=4.0, key_s=10.0, retire_s=5.0, roll_back_share=0.4
        )
        yield world
    finally:
        await world.stop()


class Holdings:
    """What engine and database hold."""

    def __init__(self, world: MachineWorld) -> None:
        self._world = world
        self._database = sa.create_engine(world.database_url.replace("sqlite+aiosqlite", "sqlite"))

    async def find_gauges(self, client: httpx.AsyncClient) -> dict[str, float]:
        """What must not grow."""
        (state,) = await self._world.read_states(client)
        held = list_held(state)
        return {
            "KV blocks in use": held.get("blocks", 0),
            "pins of slots": held.get("pins", 0),
            "slots in use": sum(slot["digest"] is not None for slot in state["slots"]),
            "requests in the engine": held.get("open_requests", 0),
            "requests in its queue": held.get("waiting", 0),
            **await asyncio.to_thread(self._count_rows),
        }

    def _count_rows(self) -> dict[str, float]:
        staged = sum(path.is_file() for path in (self._world.folder / "objects" / "staging").rglob("*"))
        with self._database.connect() as connection:
            rows = {name: float(connection.scalar(sa.text(query)) or 0) for name, query in OPEN_ROWS.items()}
        return {"files of open uploads": staged, **rows}

    def close(self) -> None:
        """Let go of the database."""
        self._database.dispose()


def is_over(passed_s: float, books: Books, since: Since) -> bool:
    """Whether the time is over; a sample goes on until it has seen answers of both kinds, on a slow machine."""
    if SOAK_S:
        return passed_s >= SOAK_S
    ends = {answer.end for answer in books.answers[since.answers :]}
    return passed_s >= MOST_S or (passed_s >= SAMPLE_S and ends >= {"ok", GONE})


@pytest.mark.endure
async def test_nothing_grows_and_every_answer_is_right(world: MachineWorld) -> None:
    length_s = SOAK_S or SAMPLE_S
    books, since, holdings = world.clients.books, Since.of(world.clients.books), Holdings(world)
    sampler = Sampler(world.platform.pid)
    began_at = time.monotonic()
    async with world.clients.client() as client:
        async with world.clients.load():
            while not is_over(passed_s := time.monotonic() - began_at, books, since):
                await asyncio.to_thread(sampler.take, await holdings.find_gauges(client))
                await asyncio.sleep(min(max(1.0, length_s / NUM_SAMPLES), max(0.1, length_s - passed_s)))
        await world.wait_idle()
        left = {name: value for name, value in (await holdings.find_gauges(client)).items() if value}
    holdings.close()
    check_answers(books, since, world.reference)
    await check_kept(world.clients, since)
    await check_rows(world.database_url, books, since)
    assert books.faults == []
    assert set(left) <= {"slots in use"}, left
    answers, acts = books.answers[since.answers :], books.acts[since.acts :]
    assert {answer.end for answer in answers} == {"ok", GONE}, count_ends(answers)
    assert {act.end for act in acts} == {"ok"}, [act for act in acts if act.end != "ok"]
    assert len({answer.model for answer in answers}) == NUM_ADAPTERS + 1 or not SOAK_S
    series = sampler.list_series(len(answers))
    report = (
        f"{length_s:.0f} s, {NUM_ADAPTERS} adapters in {NUM_SLOTS} slots: {count_ends(answers)}, "
        f"{len(books.versions) - len(since.versions)} uploads, {len(books.changes) - since.changes} changes of names, "
        f"{len(books.retired)} retired, {len(books.key_ids) - since.key_ids} keys\n\n{show(series)}\n"
    )
    print(f"\n{report}")
    if path := os.environ.get("LORAPLEX_TEST_SOAK_REPORT"):
        await asyncio.to_thread(Path(path).write_text, report)
    if SOAK_S:
        assert [one.name for one in series if one.climb > one.limit] == [], show(series)
