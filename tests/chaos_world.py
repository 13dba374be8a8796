"""Gateways on Postgres and Redis with two engines, all of which can be killed, under clients that keep books.

`Books` holds what was asked, what was answered and what was acknowledged; whoever reads them decides what was wrong.
Engines are scripted: what an adapter says depends on its digest alone, so a wrong answer is one that can be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from databases import EmbeddedPostgres
from gateway_world import ADMIN_KEY, BASE
from redis_world import RedisServer
from scripted_engine import FINGERPRINT, echo
from support import free_port, linear_shapes, tiny_llama_config, write_adapter, write_base

TESTS = Path(__file__).resolve().parent
TENANTS = ("team-x", "team-y")
NUM_CLIENTS = 6
LONGEST_S = 20.0
"""No answer may take longer, whatever is dead; those that are asked for take half a second at most."""
MAX_KEYS = 20
CUT = "cut"
GATEWAY_PROGRAM = "import os, sys; from loraplex.app import run; from loraplex.settings import load_settings; "
GATEWAY_PROGRAM += "sys.exit(run(load_settings(os.environ)))"
# far above the load, also where each gateway counts by itself: they put Redis into the way of every request
_LIMITS = {"requests_per_minute": 100_000, "tokens_per_minute": 100_000_000, "concurrent_requests": 1000}
_START_S = 180.0
_THINK_S = 0.02
_GAP_S = 0.03


class Process:
    """A server on a port of its own, the same in all its lives; `is_ready` reads the answer to GET `path`."""

    def __init__(self, argv: list[str], environ: dict[str, str], log: Path, port: int, path: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._argv, self._environ, self._log, self._path = argv, environ, log, path
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it serves."""
        with self._log.open("ab") as log:
            options: dict[str, Any] = {"env": self._environ, "stdin": subprocess.DEVNULL, "cwd": TESTS}
            self._process = subprocess.Popen([sys.executable, *self._argv], stdout=log, stderr=log, **options)
        deadline = time.monotonic() + _START_S
        while True:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}{self._path}", trust_env=False).status_code == 200:
                    return
            time.sleep(0.05)

    def kill(self) -> None:
        """`kill -9`; fine if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None


@dataclass
class Answer:
    """One request and its end: `ok`, the code of an error, or `CUT`."""

    gateway: str
    tenant: str
    word: str
    count: int
    began_at: float
    ended_at: float = 0.0
    told_at: float = 0.0
    """When its status was there."""
    request_id: str | None = None
    digest: str | None = None
    text: str = ""
    end: str = CUT

    @property
    def num_read(self) -> int:
        """Chunks of the answer that arrived whole."""
        return len(self.text) // len(next(echo("", "", 1)))


@dataclass
class Change:
    """A move of a tenant's alias to a version; `acknowledged_at` is None for ever where nobody answered."""

    number: int
    began_at: float
    revision: int | None = None
    acknowledged_at: float | None = None


@dataclass
class Books:
    """What clients know. `faults` are answers that nobody should get."""

    answers: list[Answer] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    keys: dict[str, list[str]] = field(default_factory=lambda: {tenant: [] for tenant in TENANTS})
    management_ends: list[tuple[float, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def allowed(self, since: float, until: float) -> set[int]:
        """Versions that an answer may come from that was asked at `since` and begun at `until`."""
        last = max(
            (
                index
                for index, change in enumerate(self.changes)
                if change.acknowledged_at is not None and change.acknowledged_at <= since
            ),
            default=0,
        )
        later = {change.number for change in self.changes[last + 1 :] if change.began_at <= until}
        return {self.changes[last].number} | later


class ChaosWorld:
    """All processes, and the clients."""

    def __init__(self, folder: Path, postgres: EmbeddedPostgres, redis: RedisServer, database_url: str) -> None:
        self.folder = folder
        self.postgres, self.redis, self.database_url = postgres, redis, database_url
        self.books = Books()
        self.digests: dict[str, dict[int, str]] = {tenant: {} for tenant in TENANTS}
        self.chance = random.Random(os.urandom(4))
        environ = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        self.engines = [self._build_engine(index, environ) for index in range(2)]
        self.gateways = [self._build_gateway(index, environ) for index in range(2)]
        self._is_over = asyncio.Event()

    def _build_engine(self, index: int, environ: dict[str, str]) -> Process:
        port = free_port()
        argv = ["scripted_engine_process.py", str(port)]
        return Process(argv, environ, self.folder / f"engine-{index}.log", port, "/internal/state")

    def _build_gateway(self, index: int, environ: dict[str, str]) -> Process:
        port = free_port()
        engines = [engine.url for engine in self.engines]
        settings = {
            "LORAPLEX_DATA_DIR": str(self.folder / f"gateway-{index}"),
            "LORAPLEX_LISTEN": f"127.0.0.1:{port}",
            "LORAPLEX_DATABASE_URL": self.database_url,
            "LORAPLEX_REDIS_URL": self.redis.url,
            "LORAPLEX_OBJECT_STORE_URL": f"file://{self.folder}/objects",
            "LORAPLEX_POOLS": json.dumps({"main": {"base": BASE, "engines": engines}}),
            "LORAPLEX_ADMIN_KEY": ADMIN_KEY,
            "LORAPLEX_KEY_PEPPER": "a-pepper-that-gateways-share",
            "LORAPLEX_PARITY_GATE": "off",
        }
        return Process(
            ["-c", GATEWAY_PROGRAM], environ | settings, self.folder / f"gateway-{index}.log", port, "/readyz"
        )

    def start(self) -> None:
        """Start all that this made; Postgres and Redis run."""
        for process in (*self.engines, *self.gateways):
            process.start()

    def stop(self) -> None:
        """End it, without grace."""
        for process in (*self.gateways, *self.engines):
            process.kill()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client with connections of its own."""
        async with httpx.AsyncClient(timeout=LONGEST_S, trust_env=False) as client:
            yield client

    async def prepare(self) -> None:
        """Make the base, the tenants, two versions for the first and one for the second, and a key for each."""
        config = tiny_llama_config()
        write_base(self.folder / BASE, config)
        modules = {path: list(shape) for path, shape in linear_shapes(config).items()}
        base = {"name": BASE, "fingerprint": FINGERPRINT, "modules": modules, "vocab_size": config["vocab_size"]}
        url, headers = self.gateways[0].url, {"authorization": f"Bearer {ADMIN_KEY}"}
        async with self.client() as client:

            async def post(path: str, **options: Any) -> Any:
                answer = await client.post(f"{url}/api/v1{path}", headers=headers, **options)
                assert answer.status_code in (200, 201), answer.text
                return answer.json()

            await post("/bases", json=base)
            for seed, tenant in enumerate(("team-x", "team-x", "team-y")):
                if not self.books.keys[tenant]:
                    await post("/tenants", json={"name": tenant, "limits": _LIMITS})
                    self.books.keys[tenant].append((await post(f"/tenants/{tenant}/keys", json={"name": "k"}))["key"])
                source = write_adapter(self.folder / f"adapter-{seed}", self.folder / BASE, rank=2, seed=seed)
                files = [("files", (path.name, path.read_bytes())) for path in sorted(source.iterdir())]
                version = await post(f"/tenants/{tenant}/adapters/default/versions", files=files)
                self.digests[tenant][version["version"]] = version["digest"]
        self.books.changes.append(Change(1, time.monotonic(), acknowledged_at=time.monotonic()))
        await asyncio.sleep(2)  # until both gateways have seen the engines serve the base

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Clients that ask without a pause while the block runs."""
        self._is_over.clear()
        works = [self._ask_on() for _ in range(NUM_CLIENTS)] + [self._move_on(), self._make_keys()]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield
        finally:
            self._is_over.set()
            await asyncio.gather(*tasks)

    async def _ask_on(self) -> None:
        async with self.client() as client:
            while not self._is_over.is_set():
                await self._ask(client)
                await asyncio.sleep(_THINK_S)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        tenant, count, is_stream = self.chance.choice(TENANTS), self.chance.randint(1, 20), self.chance.random() < 0.7
        word = f"w{len(self.books.answers)}"
        key = self.chance.choice(self.books.keys[tenant])
        answer = Answer(self.chance.choice(self.gateways).url, tenant, word, count, time.monotonic())
        self.books.answers.append(answer)
        body = {"model": tenant, "prompt": f"echo {count} {_GAP_S} {word}", "stream": is_stream}
        try:
            async with asyncio.timeout(LONGEST_S):
                await _read_answer(client, answer, body, key)
        except httpx.TransportError:
            answer.end = CUT
        except TimeoutError:
            self.books.faults.append(f"no end: {answer}")
        answer.ended_at = time.monotonic()

    async def _move_on(self) -> None:
        """Move the first tenant's alias to and fro, through any gateway."""
        path = f"/api/v1/tenants/{TENANTS[0]}/adapters/default/aliases/live"
        etag = None
        async with self.client() as client:
            while not self._is_over.is_set():
                await asyncio.sleep(0.2)
                if etag is None:
                    answer = await self._manage(client, "GET", path)
                    etag = None if answer is None else answer.headers["etag"]
                    continue
                number = 3 - self.books.changes[-1].number
                self.books.changes.append(Change(number, time.monotonic()))
                body = {"targets": [{"version": number, "weight": 100}]}
                answer = await self._manage(client, "PUT", path, json=body, headers={"if-match": etag})
                etag = None if answer is None else answer.headers["etag"]
                if answer is not None:
                    change = self.books.changes[-1]
                    change.revision, change.acknowledged_at = answer.json()["revision"], time.monotonic()

    async def _make_keys(self) -> None:
        """Make keys; others use each as soon as it is acknowledged, wherever they ask."""
        async with self.client() as client:
            while not self._is_over.is_set():
                tenant = self.chance.choice(TENANTS)
                path = f"/api/v1/tenants/{tenant}/keys"
                answer = await self._manage(client, "POST", path, json={"name": "k"})
                if answer is not None and len(self.books.keys[tenant]) < MAX_KEYS:
                    self.books.keys[tenant].append(answer.json()["key"])
                await asyncio.sleep(0.3)

    async def _manage(
        self, client: httpx.AsyncClient, method: str, path: str, headers: dict[str, str] | None = None, **options: Any
    ) -> httpx.Response | None:
        """One management call to any gateway; None where it did not go well."""
        began_at, url = time.monotonic(), self.chance.choice(self.gateways).url
        every = {"authorization": f"Bearer {ADMIN_KEY}", **(headers or {})}
        try:
            async with asyncio.timeout(LONGEST_S):
                answer = await client.request(method, f"{url}{path}", headers=every, **options)
        except httpx.TransportError:
            self.books.management_ends.append((began_at, CUT))
            return None
        except TimeoutError:
            self.books.faults.append(f"no end: {method} {path}")
            return None
        is_good = answer.status_code in (200, 201)
        self.books.management_ends.append((began_at, "ok" if is_good else answer.json()["error"]["code"]))
        return answer if is_good else None


async def _read_answer(client: httpx.AsyncClient, answer: Answer, body: dict[str, Any], key: str) -> None:
    url, headers = f"{answer.gateway}/v1/completions", {"authorization": f"Bearer {key}"}
    async with client.stream("POST", url, json=body, headers=headers) as response:
        answer.told_at = time.monotonic()
        answer.request_id = response.headers.get("x-request-id")
        answer.digest = response.headers.get("x-loraplex-digest")
        if response.status_code != 200 or not body["stream"]:
            found = json.loads(await response.aread())
            is_good = response.status_code == 200
            answer.text = found["choices"][0]["text"] if is_good else ""
            answer.end = "ok" if is_good else found["error"]["code"]
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                answer.end = "ok"
                return
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                answer.end = event["error"]["code"]
                return
            answer.text += event["choices"][0]["text"]


def count_ends(answers: list[Answer]) -> dict[str, int]:
    """How many of some answers ended each way."""
    ends: dict[str, int] = {}
    for answer in answers:
        ends[answer.end] = ends.get(answer.end, 0) + 1
    return ends
