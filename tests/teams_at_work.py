"""Teams that do all that a control plane is for, over and over: whoever changes something below them must not show.

`Team` knows what it has been told and holds the platform to that; it knows nothing of what is done to the platform.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from gateway_world import GatewayWorld, until

TEAMS = ("team-a", "team-b", "team-c")
_REST_S = 0.2
"""After each round: whoever waits for something meanwhile shall not pay for hundreds."""


class Team:
    """What one team does all day, and what must be true of it afterwards."""

    def __init__(self, world: GatewayWorld, name: str) -> None:
        self.world, self.name = world, name
        self.key = ""
        self.num_rounds = 0
        self.num_calls = 0
        self.digests: list[str] = []
        self.num_revoked = 0

    async def begin(self) -> None:
        await self.world.create_tenant(self.name)
        self.key = await self.world.create_key(self.name, owner="app")

    async def work(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            await self.do_round()
            self.num_rounds += 1
            await asyncio.sleep(_REST_S)

    async def do_round(self) -> None:
        """Upload, call what is live, promote, call that, make a key, call with it, revoke it, read the books."""
        version = await self.world.push(self.name, promote="never" if self.digests else "always")
        live = self.digests[-1] if self.digests else version["digest"]
        await self.call(self.key, live)
        if self.digests:
            await self.promote(version["version"])
        self.digests.append(version["digest"])
        await self.call(self.key, version["digest"])
        await self.make_and_revoke_a_key(version["digest"])
        await self.read_books(version["version"])

    async def call(self, key: str, digest: str) -> None:
        answer = await self.world.complete(self.name, "answer", key)
        assert answer.status_code == 200, answer.text
        self.num_calls += 1
        asked = answer.headers["x-request-id"]
        told = [call["body"]["model"] for call in self.world.engine.calls if _is_of(call, asked)]
        assert told == [digest]

    async def promote(self, number: int) -> None:
        path = f"/api/v1/tenants/{self.name}/adapters/default/aliases/live"
        revision = (await self.get(path)).headers["etag"]
        body = {"targets": [{"version": number, "weight": 100}]}
        answer = await self.world.call("PUT", path, json=body, headers={"If-Match": revision})
        assert answer.status_code == 200, answer.text

    async def make_and_revoke_a_key(self, digest: str) -> None:
        path = f"/api/v1/tenants/{self.name}/keys"
        made = await self.world.call("POST", path, json={"name": "brief"})
        assert made.status_code == 201, made.text
        await self.call(made.json()["key"], digest)
        gone = await self.world.call("DELETE", f"{path}/{made.json()['id']}")
        assert gone.status_code in (200, 204), gone.text
        refused = await self.world.complete(self.name, "answer", made.json()["key"])
        assert refused.status_code == 401, refused.text
        self.num_revoked += 1

    async def read_books(self, number: int) -> None:
        (sums,) = (await self.get(f"/api/v1/usage?tenant={self.name}&group_by=tenant")).json()["data"]
        assert sums["tenant"] == self.name
        events = (await self.get(f"/api/v1/audit?tenant={self.name}&limit=200")).json()["data"]
        assert any(event["subject"].endswith(f"@{number}") for event in events)
        assert any(event["action"] == "key.revoked" for event in events)

    async def get(self, path: str) -> Any:
        answer = await self.world.call("GET", path)
        assert answer.status_code == 200, answer.text
        return answer

    async def check_nothing_is_lost(self) -> None:
        """Every version, every event and every call is where it belongs."""
        adapter = f"/api/v1/tenants/{self.name}/adapters/default"
        versions = (await self.get(f"{adapter}/versions?limit=200")).json()["data"]
        assert sorted(version["digest"] for version in versions) == sorted(self.digests)
        keys = (await self.get(f"/api/v1/tenants/{self.name}/keys?limit=200")).json()["data"]
        assert sum(key["revoked_at"] is not None for key in keys) == self.num_revoked
        usage = [row for row in await self.world.usage() if row["tenant"] == self.name]
        assert [row["outcome"] for row in usage] == ["ok"] * self.num_calls
        assert {row["digest"] for row in usage} == set(self.digests)


def _is_of(call: dict[str, Any], request_id: str) -> bool:
    return bool(call["headers"]["x-loraplex-request-id"] == request_id)


class Fleet:
    """All teams at work on one gateway, until the end of `at_work`."""

    def __init__(self, teams: list[Team], tasks: list[asyncio.Task[None]]) -> None:
        self.teams, self._tasks = teams, tasks

    async def work_on(self, rounds: int) -> None:
        """Return when each team has done so many rounds more."""
        wanted = [team.num_rounds + rounds for team in self.teams]
        await until(lambda: self._have_done(wanted), 120)

    def _have_done(self, wanted: list[int]) -> bool:
        for task in self._tasks:
            if task.done():
                # a request failed
                task.result()
        return all(team.num_rounds >= want for team, want in zip(self.teams, wanted, strict=True))


@asynccontextmanager
async def at_work(world: GatewayWorld, num_teams: int) -> AsyncIterator[Fleet]:
    """Yield teams that work from now on; a request of theirs that fails, fails the test."""
    teams = [Team(world, name) for name in TEAMS[:num_teams]]
    for team in teams:
        await team.begin()
    is_over = False
    tasks = [asyncio.create_task(team.work(lambda: is_over)) for team in teams]
    try:
        yield Fleet(teams, tasks)
        is_over = True
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
