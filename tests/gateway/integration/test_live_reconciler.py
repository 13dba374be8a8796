"""The same with real engines: what they were told to hold is in their slots, and answers, whatever was planted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fleet_world import FleetWorld, running_fleet
from gateway_world import until
from loraplex.fleet.difference import read_pinned
from planted import purge_by_hand
from support import write_adapter

GONE_S = 10.0
BOTH, ONE = "team-both", "team-one"


@pytest.fixture
def dialect() -> str:
    return "sqlite"


class Watched:
    """What a test asks of the fleet."""

    def __init__(self, fleet: FleetWorld) -> None:
        self.fleet = fleet
        self._num_pushed = 0

    async def push(self, tenant: str, **params: Any) -> str:
        """Upload a new random adapter version and return its digest."""
        self._num_pushed += 1
        source = self.fleet.folder / "pushed" / str(self._num_pushed)
        write_adapter(source, self.fleet.base, rank=4, seed=self._num_pushed)
        files = [("files", (path.name, path.read_bytes())) for path in sorted(source.iterdir())]
        path = f"/api/v1/tenants/{tenant}/adapters/default/versions"
        response = await self.fleet.call("POST", path, files=files, params=params)
        assert response.status_code == 201, response.text
        digest: str = response.json()["digest"]
        return digest

    def pinned(self) -> list[set[str]]:
        """What each engine says that it holds pinned; of one that does not serve nothing."""
        url_to_replica = {one.url: one for one in self.fleet.gateway.fleet.view.replicas}
        found = [url_to_replica[engine.url] for engine in self.fleet.processes]
        return [set() if one.problem else set(read_pinned(one) & one.resident) for one in found]

    def resident(self, index: int) -> frozenset[str]:
        """What is in an engine's slots."""
        url = self.fleet.processes[index].url
        return next(one.resident for one in self.fleet.gateway.fleet.view.replicas if one.url == url)

    async def tell(self, index: int, digest: str, *, pin: bool) -> None:
        """Tell an engine what to hold, behind the platform's back."""
        url = self.fleet.processes[index].url
        assert (await self.fleet.gateway.fleet.client(url).load_adapter(digest, pin=pin)).status_code == 200
        await self.fleet.gateway.fleet.poll()

    async def wait(self, condition: Callable[[], bool | Awaitable[bool]]) -> None:
        """Wait until a difference is gone."""
        await until(condition, GONE_S)

    async def told(self, action: str, *digests: str) -> None:
        """Wait until events of an action tell of exactly these digests, the same ones as often."""

        async def are_told() -> bool:
            answer = await self.fleet.call("GET", "/api/v1/audit", params={"action": f"fleet.{action}", "limit": 200})
            events: list[dict[str, Any]] = answer.json()["data"]
            return sorted(event["details"]["digest"] for event in events) == sorted(digests)

        await self.wait(are_told)


@pytest.mark.endure
async def test_real_engines_become_what_is_wanted(
    database_url: str, tmp_path: Path, long: Callable[[float, float], float]
) -> None:
    if not long(0, 1):
        pytest.skip("takes half a minute; in test_reconciler.py scripted engines are held to the same")
    pins = [BOTH, {"model": ONE, "copies": 1}]
    async with running_fleet(database_url, tmp_path, 2, "--max-loras", "4", pins=pins, warm_s=0.0) as fleet:
        watched = Watched(fleet)
        for tenant in (BOTH, ONE, "team-loose"):
            await fleet.create_tenant(tenant)
        both, one, loose = [await watched.push(tenant) for tenant in (BOTH, ONE, "team-loose")]
        # missing: nobody has called them
        await watched.wait(lambda: sorted(map(len, watched.pinned())) == [1, 2])
        home = next(index for index, held in enumerate(watched.pinned()) if one in held)
        assert all(both in held for held in watched.pinned())
        await watched.told("adapter_loaded", both, both, one)

        # a pin that is gone, and one that nobody wants
        await watched.tell(home, both, pin=False)
        await watched.tell(home, loose, pin=True)
        await watched.wait(lambda: watched.pinned()[home] == {both, one})
        await watched.told("adapter_pinned", both)
        await watched.told("adapter_unpinned", loose)
        assert loose in watched.resident(home)

        # dead: its copy moves
        fleet.processes[home].kill()
        await watched.wait(lambda: watched.pinned()[1 - home] == {both, one})
        key = await fleet.create_key(ONE)
        answer = await fleet.complete(ONE, "hello", key, fields={"max_tokens": 2})
        assert (answer.status_code, answer.headers["x-loraplex-digest"]) == (200, one)

        # gone from all names while the engine was away, and back with what it had on its disk
        assert (await fleet.call("DELETE", "/api/v1/tenants/team-loose/adapters/default")).status_code == 204
        fleet.processes[home].start()
        await fleet.wait_serving(2)
        await watched.wait(lambda: (watched.pinned()[home], watched.pinned()[1 - home]) == ({both, one}, {both}))
        await watched.tell(home, loose, pin=False)
        await watched.wait(lambda: loose not in watched.resident(home))
        await watched.told("adapter_dropped", loose)

        # an alias to a purged version: the pin follows it back
        new = await watched.push(BOTH, promote="always")
        await watched.wait(lambda: all(new in held and both not in held for held in watched.pinned()))
        await purge_by_hand(database_url, "default", [2])
        await watched.wait(lambda: all(both in held and new not in held for held in watched.pinned()))

        async def is_clean() -> bool:
            return (await fleet.call("GET", "/api/v1/fleet")).json()["differences"] == []

        await watched.wait(is_clean)
