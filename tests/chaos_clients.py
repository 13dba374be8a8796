"""Clients of the chaos and soak suites: they ask, leave, move aliases, upload, retire and make keys, and keep books.

They know addresses and keys, never a process. A call that fails is noted and the next one is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from chaos_books import CUT, GONE, Act, Answer, Books
from chaos_reference import GREEDY, PROMPTS, Reference
from support import write_adapter

TENANTS = ("team-x", "team-y")
MOVED, FRESH = "team-x/moved", "team-y/fresh"
"""The adapter whose alias goes to and fro, and the one that gets new versions."""
PATIENCE_S = 90.0
"""What no client waits for: the bound of each fault is held against the books."""
MAX_KEYS = 12
_THINK_S = 0.05
# far above the load, also where each gateway counts by itself: they put Redis into the way of every request
_LIMITS = {"requests_per_minute": 100_000, "tokens_per_minute": 100_000_000, "concurrent_requests": 1000}
_SORTS = ("stream", "stream", "stream", "whole", "whole", "choices", "left")
_ARRIVED = (httpx.codes.OK, httpx.codes.CREATED)


@dataclass
class Pace:
    """How much is asked: clients at once, and the seconds between two changes of a kind; 0 makes none."""

    num_clients: int = 4
    move_s: float = 0.3
    upload_s: float = 1.0
    key_s: float = 0.5
    retire_s: float = 0.0
    roll_back_share: float = 0.0


class Clients:
    """All of them; `reference` says what is right."""

    def __init__(self, urls: Sequence[str], admin_key: str, folder: Path, base: Path, reference: Reference) -> None:
        self.urls = list(urls)
        self.books = Books(keys={tenant: [] for tenant in TENANTS})
        self.reference = reference
        self.chance = random.Random(7)
        self.models: list[str] = [base.name]
        self.moved: dict[str, int] = {}
        """The versions of `MOVED` by digest."""
        self.pace = Pace()
        self.admin = {"authorization": f"Bearer {admin_key}"}
        self._folder, self._base = folder, base
        self._serial = 0
        self._is_over = asyncio.Event()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client with connections of its own."""
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            yield client

    async def prepare(self, spec: dict[str, Any], num_still: int) -> None:
        """Register the base, make tenants and keys, two versions of `MOVED`, one of each other adapter."""
        async with self.client() as client:
            await self._must(client, "POST", "/bases", json=spec)
            for tenant in TENANTS:
                await self._must(client, "POST", "/tenants", json={"name": tenant, "limits": _LIMITS})
                key = await self._must(client, "POST", f"/tenants/{tenant}/keys", json={"name": "first"})
                self.books.keys[tenant].append(key["key"])
            stills = [f"{TENANTS[index % 2]}/still-{index}" for index in range(num_still)]
            for model in (MOVED, FRESH, *stills):
                self.models.append(model)
                await self.upload(client, self.urls[0], model, "auto")
            change = await self.upload(client, self.urls[0], MOVED, "never")
            assert change is not None
            self.moved = {digest: number for (model, number), digest in self.books.versions.items() if model == MOVED}
            assert len(self.moved) == 2

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Ask without a pause while the block runs."""
        self._is_over.clear()
        works = [self._repeat(self.ask, _THINK_S) for _ in range(self.pace.num_clients)]
        works += [
            self._repeat(work, pause_s)
            for work, pause_s in (
                (self.move, self.pace.move_s),
                (self.refresh, self.pace.upload_s),
                (self.make_key, self.pace.key_s),
                (self.retire, self.pace.retire_s),
            )
            if pause_s
        ]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield
        finally:
            self._is_over.set()
            await asyncio.gather(*tasks)

    async def _repeat(self, work: Callable[[httpx.AsyncClient, str], Awaitable[Any]], pause_s: float) -> None:
        async with self.client() as client:
            while not self._is_over.is_set():
                await work(client, self.chance.choice(self.urls))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_over.wait(), pause_s * self.chance.uniform(0.5, 1.5))

    async def ask(self, client: httpx.AsyncClient, url: str, model: str = "", sort: str = "") -> Answer:
        """One generation, of a model and sort of chance unless told."""
        model = model or self.chance.choice(self.models)
        tenant = model.partition("/")[0] if "/" in model else TENANTS[0]
        answer = Answer(url, model, self.chance.choice(PROMPTS), time.monotonic())
        self.books.answers.append(answer)
        sort = sort or self.chance.choice(_SORTS)
        body = {"model": model, "prompt": answer.prompt, **GREEDY}
        headers = {"authorization": f"Bearer {self.chance.choice(self.books.keys[tenant])}"}
        try:
            async with asyncio.timeout(PATIENCE_S):
                await _read_answer(client, answer, body, headers, sort)
        except httpx.TransportError:
            answer.end = CUT
        except TimeoutError:
            self.books.faults.append(f"no end: {answer}")
        answer.ended_at = time.monotonic()
        return answer

    async def move(self, client: httpx.AsyncClient, url: str) -> bool:
        """Move the alias of `MOVED` to its other version, or back by a rollback; whether that was acknowledged."""
        path = self.path(MOVED, "/aliases/live")
        before = await self.manage(client, url, "GET", path)
        if before is None:
            return False
        (digest,) = (found for found, n in self.moved.items() if n != before.json()["targets"][0]["version"])
        change = self.books.begin_change(MOVED, digest)
        change.number = self.moved[digest]
        headers = {"if-match": before.headers["etag"]}
        if self.chance.random() < self.pace.roll_back_share and before.json()["revision"] > 1:
            after = await self.manage(client, url, "POST", f"{path}/rollback", headers=headers, allow=(409,))
        else:
            body = {"targets": [{"version": change.number, "weight": 100}]}
            after = await self.manage(client, url, "PUT", path, json=body, headers=headers, allow=(412,))
        if after is None:
            return False
        if after.status_code not in _ARRIVED:
            self.books.changes.remove(change)
            return False
        change.revision, change.acknowledged_at = after.json()["revision"], time.monotonic()
        if after.json()["targets"][0]["version"] != change.number:
            self.books.faults.append(f"{change} was answered with {after.json()}")
        return True

    async def refresh(self, client: httpx.AsyncClient, url: str) -> bool:
        """A new version of `FRESH`, live at once; whether it was acknowledged."""
        return await self.upload(client, url, FRESH, "always") is not None

    async def upload(self, client: httpx.AsyncClient, url: str, model: str, promote: str) -> dict[str, Any] | None:
        """Upload a content that nobody has seen; the version if it was acknowledged."""
        self._serial += 1
        source = self._folder / "adapters" / str(self._serial)
        await asyncio.to_thread(write_adapter, source, self._base, rank=4, seed=self._serial)
        digest = await self.reference.learn(source)
        files = [("files", (path.name, path.read_bytes())) for path in sorted(source.iterdir())]
        change = None if promote == "never" else self.books.begin_change(model, digest)
        path = self.path(model, f"/versions?promote={promote}")
        answer = await self.manage(client, url, "POST", path, files=files)
        if answer is None:
            return None
        version: dict[str, Any] = answer.json()
        self.books.note_version(model, version["version"], version["digest"])
        if version["digest"] != digest:
            self.books.faults.append(f"{model}@{version['version']} is {version['digest']}, and was sent as {digest}")
        if change is not None:
            if version["promoted"]:
                change.number, change.acknowledged_at = version["version"], time.monotonic()
            else:
                self.books.changes.remove(change)
        return version

    async def retire(self, client: httpx.AsyncClient, url: str) -> bool:
        """Retire a version of `FRESH` that is not live; whether that was acknowledged."""
        live = [change.number for change in self.books.changes if change.model == FRESH and change.number]
        able = [key for key in self.books.versions if key[0] == FRESH and key not in self.books.retired]
        able = [key for key in able if key[1] not in live[-3:]]
        if not able:
            return False
        key = self.chance.choice(able)
        self.books.retired[key] = {True, False}
        answer = await self.manage(client, url, "DELETE", self.path(FRESH, f"/versions/{key[1]}"), allow=(409,))
        if answer is None:
            return False
        self.books.retired[key] = {answer.status_code != httpx.codes.CONFLICT}
        return True

    async def make_key(self, client: httpx.AsyncClient, url: str) -> bool:
        """Make a key, which others use as soon as it is acknowledged, wherever they ask."""
        tenant = self.chance.choice(TENANTS)
        answer = await self.manage(client, url, "POST", f"/tenants/{tenant}/keys", json={"name": "k"})
        if answer is None:
            return False
        self.books.keys[tenant] = [*self.books.keys[tenant], answer.json()["key"]][-MAX_KEYS:]
        self.books.key_ids.append(answer.json()["id"])
        return True

    async def manage(
        self,
        client: httpx.AsyncClient,
        url: str,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        allow: Sequence[int] = (),
        **options: Any,
    ) -> httpx.Response | None:
        """One management call; None where it did not go well, and that is noted."""
        began_at, what = time.monotonic(), f"{method} {path}"
        answer, end = None, CUT
        try:
            async with asyncio.timeout(PATIENCE_S):
                found = await client.request(
                    method, f"{url}/api/v1{path}", headers={**self.admin, **(headers or {})}, **options
                )
            is_good = found.status_code < httpx.codes.BAD_REQUEST or found.status_code in allow
            answer, end = (found, "ok") if is_good else (None, found.json()["error"]["code"])
        except httpx.TransportError:
            pass
        except TimeoutError:
            self.books.faults.append(f"no end: {what}")
        self.books.acts.append(Act(url, what, began_at, time.monotonic(), end))
        return answer

    async def _must(self, client: httpx.AsyncClient, method: str, path: str, **options: Any) -> Any:
        answer = await self.manage(client, self.urls[0], method, path, **options)
        assert answer is not None, self.books.acts[-1]
        return answer.json()

    @staticmethod
    def path(model: str, rest: str) -> str:
        """Below an adapter, in the management API."""
        tenant, _, adapter = model.partition("/")
        return f"/tenants/{tenant}/adapters/{adapter}{rest}"


async def _read_answer(
    client: httpx.AsyncClient, answer: Answer, body: dict[str, Any], headers: dict[str, str], sort: str
) -> None:
    is_stream = sort != "whole"
    body |= {"stream": is_stream, "n": 2 if sort == "choices" else 1}
    body |= {"stream_options": {"include_usage": True}} if is_stream else {}
    answer.texts = [""] * body["n"]
    async with client.stream("POST", f"{answer.gateway}/v1/completions", json=body, headers=headers) as response:
        answer.told_at = time.monotonic()
        answer.request_id = response.headers.get("x-request-id")
        if response.status_code != httpx.codes.OK:
            answer.end = json.loads(await response.aread())["error"]["code"]
            return
        answer.digest = response.headers.get("x-loraplex-digest")
        if not is_stream:
            whole = json.loads(await response.aread())
            answer.texts = [choice["text"] for choice in whole["choices"]]
            answer.end, answer.num_tokens = "ok", whole["usage"]["completion_tokens"]
            return
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                answer.end = "ok"
                return
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                answer.end = event["error"]["code"]
                return
            _take_event(answer, event)
            if sort == "left" and answer.texts[0]:
                answer.end = GONE
                return


def _take_event(answer: Answer, event: dict[str, Any]) -> None:
    for choice in event["choices"]:
        answer.texts[choice["index"]] += choice["text"]
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]
