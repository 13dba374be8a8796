"""What the worlds of the chaos and soak suites have in common: a base, a reference, clients, and when all is well."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx

from chaos_clients import Clients
from chaos_reference import Reference
from loraplex.keys.files import load_signing_key
from loraplex_engine.bases.pull import pull
from loraplex_registry.wire.identity import Identity, TokenSigner
from server_process import ServerProcess
from support import tiny_llama_config, write_base

ADMIN_KEY = "the-admin-key-of-the-chaos"
NUM_STILL = 2
_WHOLE_S = 120.0
_IDLE_S = 20.0
_PAUSE_S = 0.1
_READER = Identity(
    role="admin", tenant_id=None, tenant=None, scopes=(), key_id="test", actor="test", request_id="req_test"
)


class World:
    """Gateways with what stands behind them, and clients that keep books."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        self.database_url = database_url
        self.base = pull(str(write_base(folder / "tiny", tiny_llama_config())), folder / "bases")
        self.signer = TokenSigner(load_signing_key(None, folder))
        self.reference = Reference(folder, self.base, self.signer)
        self.clients = Clients([], ADMIN_KEY, folder, self.base, self.reference)
        self.gateways: list[ServerProcess] = []
        self.tools: dict[str, Any] = {}
        """What not every machine lets a test have: small disks by what they hold, and a clock."""
        self.cold_until = 0.0
        """So long an engine may hold it against an adapter that a fault kept it from loading."""
        self.wanted_metrics: tuple[str, ...] = ()
        """Lines that a gateway shows while all is well."""

    async def wait_answering(self, limit_s: float = _WHOLE_S) -> None:
        """Wait until every model is answered at every gateway."""
        deadline = time.monotonic() + limit_s
        async with self.clients.client() as client:
            left = [(url, model) for url in self.clients.urls for model in self.clients.models]
            while left:
                answers = await asyncio.gather(*(self.clients.ask(client, *pair, sort="whole") for pair in left))
                left = [pair for pair, answer in zip(left, answers, strict=True) if answer.end != "ok"]
                assert time.monotonic() < deadline, answers
                await asyncio.sleep(_PAUSE_S if left else 0)

    async def wait_whole(self, limit_s: float = _WHOLE_S) -> None:
        """Wait until every gateway sends traffic to every engine, counts with the others, and takes each change."""
        deadline = time.monotonic() + limit_s
        async with self.clients.client() as client:
            for url in self.clients.urls:
                while problem := await self._find_problem(client, url):
                    assert time.monotonic() < deadline, f"{url}: {problem}"
                    await asyncio.sleep(_PAUSE_S)
                for change in (self.clients.refresh, self.clients.move, self.clients.make_key):
                    while not await change(client, url):
                        assert time.monotonic() < deadline, self.clients.books.acts[-1]
                        await asyncio.sleep(_PAUSE_S)

    async def wait_idle(self, limit_s: float = _IDLE_S) -> None:
        """Wait until no engine holds anything for anybody."""
        deadline = time.monotonic() + limit_s
        async with self.clients.client() as client:
            while left := [held for state in await self.read_states(client) if (held := list_held(state))]:
                assert time.monotonic() < deadline, left
                await asyncio.sleep(_PAUSE_S)

    async def read_states(self, client: httpx.AsyncClient) -> list[dict[str, Any]]:
        """What each engine says of itself."""
        fleet = await client.get(f"{self.clients.urls[0]}/api/v1/fleet", headers=self.clients.admin)
        headers = {"authorization": f"Bearer {self.signer.sign(_READER, 'engine')}"}
        states = [await client.get(f"{one['url']}/internal/state", headers=headers) for one in fleet.json()["data"]]
        return [state.json() for state in states]

    async def _find_problem(self, client: httpx.AsyncClient, url: str) -> str:
        """Why a gateway is not whole; empty if it is."""
        try:
            fleet = await client.get(f"{url}/api/v1/fleet", headers=self.clients.admin)
            metrics = await client.get(f"{url}/metrics")
        except httpx.TransportError as error:
            return repr(error)
        if fleet.status_code != httpx.codes.OK or metrics.status_code != httpx.codes.OK:
            return fleet.text + metrics.text
        problems = [one["problem"] for one in fleet.json()["data"] if one["problem"]]
        wrong = [line for line in self.wanted_metrics if line not in metrics.text]
        return "; ".join(problems + wrong)


def list_held(state: dict[str, Any]) -> dict[str, int]:
    """What an engine holds for requests."""
    held = {
        "blocks": state["kv"]["num_blocks"] - state["kv"]["num_free"],
        "pins": sum(slot["pins"] for slot in state["slots"]),
        **{name: state[name] for name in ("running", "waiting", "open_requests")},
    }
    return {name: count for name, count in held.items() if count}
