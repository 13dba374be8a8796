"""Fifty clients at one adapter at once: numbers in a row, history in a line, no lost update, no answer of 5xx."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from loraplex_registry.db.model import AdapterRow, AliasHistoryRow, AliasRow, VersionRow
from registry_world import Caller, World, read_folder

T = "/api/v1/tenants/team-a/adapters"
A = f"{T}/style"
NUM_CLIENTS = 50
MAX_TRIES = 4
_REFUSED = {404, 409, 410, 412, 428}
"""What a client hears whose view was overtaken by another's act."""


@dataclass
class Crowd:
    """Clients that act at random, and what they were told."""

    team: Caller
    folders: list[dict[str, bytes]]
    deletes: bool
    dice: random.Random
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    numbers: list[int] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)

    async def act(self, client: int, num_acts: int) -> None:
        """Be one client: upload, then do this and that."""
        await self.upload(client)
        others: list[Callable[[int], Awaitable[None]]] = [self.upload, self.promote, self.promote, self.roll_back]
        others += [self.retire]
        for _ in range(num_acts):
            await self.dice.choice([*others, self.delete] if self.deletes else others)(client)

    async def upload(self, client: int) -> None:
        folder = self.dice.choice(self.folders)
        answer = await self.team.upload(A, folder, params={"promote": self.dice.choice(["auto", "always", "never"])})
        self.note("upload", answer, {201, 200})
        if answer.status_code == 201:
            self.numbers.append(answer.json()["version"])

    async def promote(self, client: int) -> None:
        """Look and move, again where somebody was faster: as clients of compare-and-set do."""
        for _ in range(MAX_TRIES):
            seen = await self.team("GET", f"{A}/aliases/live")
            self.note("look", seen, {200})
            if seen.status_code != 200:
                return
            targets = {"targets": [{"version": self.dice.choice(self.numbers), "weight": 100}]}
            tag = seen.headers["etag"]
            answer = await self.team("PUT", f"{A}/aliases/live", json=targets, headers={"if-match": tag})
            self.note_move("promote", answer, int(tag.strip('"')) + 1)
            if answer.status_code != 412:
                return

    async def roll_back(self, client: int) -> None:
        seen = await self.team("GET", f"{A}/aliases/live")
        if seen.status_code != 200:
            return
        answer = await self.team("POST", f"{A}/aliases/live/rollback", headers={"if-match": seen.headers["etag"]})
        self.note_move("rollback", answer, int(seen.headers["etag"].strip('"')) + 1)

    async def retire(self, client: int) -> None:
        self.note("retire", await self.team("DELETE", f"{A}/versions/{self.dice.choice(self.numbers)}"), {200})

    async def delete(self, client: int) -> None:
        if self.dice.random() < 0.3:
            self.note("delete", await self.team("DELETE", A), {204})

    def note_move(self, act: str, answer: httpx.Response, revision: int) -> None:
        self.note(act, answer, {200})
        if answer.status_code == 200:
            assert answer.json()["revision"] == revision, "it moved what the client had seen, and nothing else"
            self.moves.append(revision)

    def note(self, act: str, answer: httpx.Response, good: set[int]) -> None:
        self.answers[act, answer.status_code] += 1
        assert answer.status_code in good | _REFUSED, (act, answer.status_code, answer.text)


@pytest.fixture
def dialect() -> str:
    return "postgres"


@pytest.fixture(scope="session")
def folders(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    from support import write_adapter

    place = tmp_path_factory.mktemp("crowd")
    return [read_folder(write_adapter(place / str(seed), base_folder, rank=1, seed=seed)) for seed in range(24)]


@pytest.mark.parametrize("deletes", [False, True], ids=["", "with deletions"])
async def test_fifty_clients_at_one_adapter(world: World, folders: list[Any], deletes: bool) -> None:
    crowd = Crowd(world.caller(), folders, deletes, random.Random(7))
    await asyncio.gather(*(crowd.act(client, num_acts=1 if deletes else 2) for client in range(NUM_CLIENTS)))
    async with world.registry.services.database.read() as session:
        adapters = (await session.execute(sa.select(AdapterRow))).scalars().all()
        versions = (await session.execute(sa.select(VersionRow))).scalars().all()
        aliases = (await session.execute(sa.select(AliasRow))).scalars().all()
        history = (await session.execute(sa.select(AliasHistoryRow))).scalars().all()
    numbers = sorted(version.number for version in versions)
    assert numbers == list(range(1, len(numbers) + 1)), "numbers follow one another, also over deletions"
    assert numbers == sorted(crowd.numbers), "each 201 is one version, and none is lost"
    assert max(adapter.next_number for adapter in adapters) == len(numbers) + 1
    for alias in aliases:
        revisions = sorted(entry.revision for entry in history if entry.alias_id == alias.id)
        assert revisions == list(range(1, alias.revision + 1)), "history is a line"
    moved = Counter(entry.action for entry in history)
    assert moved["set"] + moved["rollback"] == len(crowd.moves), "each acknowledged move is in the history once"
    if not deletes:
        assert len(crowd.moves) == len(set(crowd.moves)), "no two clients moved the same revision"
    if not deletes:
        assert crowd.answers["promote", 200] > 0
        assert crowd.answers["promote", 412] > 0
