"""One adapter becomes a full fine-tune and comes back: a second real engine with weights of its own, under one name."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from app_server import running_app
from core_world import share_native
from escalation_world import EscalationWorld, build_approval, build_evidence
from fleet_world import EngineProcess, FleetWorld
from gateway_world import ADMIN_KEY, until
from loraplex.app import Gateway, running_gateway
from loraplex.client.connection import Connection
from loraplex.client.escalations import Escalations
from loraplex.client.location import Location
from loraplex.settings import Settings
from loraplex_engine.bases.folder import load_marker, load_spec
from loraplex_engine.bases.pull import pull
from loraplex_registry.http.protocol import BoundedProtocol
from support import free_port, tiny_llama_config, write_adapter, write_base

POOL, FULL_NAME = "team-x-full", "tiny-full"
PROMPT = "Forty teams share one copy of the base"
NUM_TOKENS = 12


@pytest.fixture
def dialect() -> str:
    return "sqlite"


_lives = itertools.count()


def start_engine(gateway: Gateway, url: str, folder: Path, base: Path, port: int) -> EngineProcess:
    """Start an engine of one base, pulled, that believes this gateway."""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")},
        **{name: os.environ[name] for name in ("LORAPLEX_NATIVE",) if name in os.environ},
        "LORAPLEX_VERIFY_KEYS": gateway.signer.public_pem.decode(),
        "LORAPLEX_ENGINE_KEY": "the-engine-key",
        "LORAPLEX_REGISTRY_URL": url,
        "LORAPLEX_CACHE_DIR": share_native(folder / f"cache-{next(_lives)}"),
    }
    argv = [sys.executable, "-m", "loraplex_engine", "serve", "--base", str(base), "--dtype", "float32"]
    argv += ["--cpu-threads", "1", "--served-model-name", base.name]
    process = EngineProcess(argv, environ, folder / f"engine-{port}.log", port)
    process.start()
    return process


class Escalating(EscalationWorld):
    """A gateway with an engine for the base and one for the full model."""

    world: FleetWorld

    def __init__(self, world: FleetWorld, full: Path, stack: AsyncExitStack) -> None:
        super().__init__(world, None)  # type: ignore[arg-type]
        self.full = full
        self._stack = stack

    def serve_full(self, base: Path, port: int) -> EngineProcess:
        """Let this model answer at the pool's address."""
        process = start_engine(self.world.gateway, self.world.url, self.world.folder, base, port)
        self._stack.callback(process.kill)
        return process

    async def ask(self, model: str = "team-x") -> tuple[int, str, dict[str, str]]:
        """Status, text or error code, headers of a greedy completion under the team's one key."""
        fields = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await self.world.complete(model, PROMPT, self.team, fields=fields)
        body = answer.json()
        said = body["choices"][0]["text"] if answer.status_code == 200 else body["error"]["code"]
        return answer.status_code, said, dict(answer.headers)


@asynccontextmanager
async def running(database_url: str, folder: Path) -> AsyncIterator[tuple[Escalating, int]]:
    """Yield both, and the port of the pool, at which nobody answers yet."""
    base = pull(str(write_base(folder / "tiny", tiny_llama_config())), folder / "bases")
    source = write_base(folder / "tuned" / FULL_NAME, tiny_llama_config(), seed=99)
    full = pull(str(source), folder / "bases")
    ports = [free_port(), free_port()]
    pools = {
        "main": {"base": base.name, "engines": [f"http://127.0.0.1:{ports[0]}"]},
        POOL: {"model": FULL_NAME, "engines": [f"http://127.0.0.1:{ports[1]}"]},
    }
    settings = Settings(
        database_url=database_url,
        object_store_url=f"file://{folder}/objects",
        data_dir=folder,
        pools=json.dumps(pools),
        admin_key=ADMIN_KEY,
        engine_key="the-engine-key",
        parity_gate="off",
        drain_s=1,
    )
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running_gateway(settings))
        url = await stack.enter_async_context(running_app(gateway.app, http=BoundedProtocol))
        world = FleetWorld(gateway, url, folder, base, [])
        stack.push_async_callback(world.http.aclose)
        found = Escalating(world, full, stack)
        found.world.processes.append(found.serve_full(base, ports[0]))
        response = await world.call("POST", "/api/v1/bases", json=msgspec.to_builtins(load_spec(base)))
        assert response.status_code in (200, 201), response.text
        await world.wait_serving(1)
        yield found, ports[1]


async def push(world: FleetWorld, tenant: str) -> dict[str, Any]:
    source = write_adapter(world.folder / "adapter", world.base, rank=4, seed=3)
    files = [("files", (path.name, path.read_bytes())) for path in sorted(source.iterdir())]
    path = f"/api/v1/tenants/{tenant}/adapters/default/versions"
    version: dict[str, Any] = (await world.call("POST", path, files=files)).json()
    return version


def compute_alone(folder: Path) -> str:
    """What the model says by itself, in another implementation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    text: str = tokenizer.decode(ids[0, -NUM_TOKENS:], skip_special_tokens=True)
    return text


async def serves(world: Escalating) -> bool:
    await world.world.gateway.fleet.poll()
    return (await world.ask())[0] == 200


@pytest.mark.endure
async def test_an_adapter_becomes_a_full_fine_tune_and_comes_back(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: Callable[[float, float], float]
) -> None:
    async with running(database_url, tmp_path) as (world, port):
        monkeypatch.setattr(world.world, "push", lambda tenant: push(world.world, tenant))
        await world.people()
        status, by_adapter, headers = await world.ask()
        assert (status, headers["x-loraplex-model"]) == (200, "team-x/default@1")
        digest = load_marker(world.full).digest

        public_id = (await world.open(evidence=build_evidence())).json()["id"]
        assert (await world.do(public_id, "approve", **build_approval())).status_code == 200
        assert (await world.do(public_id, "register", pool=POOL, digest=digest)).status_code == 200
        # nobody serves it yet: nothing moves
        assert (await world.do(public_id, "activate", wait_s=0.2)).status_code == 503
        assert (await world.ask())[1] == by_adapter
        engine = world.serve_full(world.full, port)
        activated = await world.do(public_id, "activate", wait_s=120)
        assert (activated.status_code, activated.json()["state"]) == (200, "active"), engine.log
        assert await asyncio.to_thread(find_digest, world) == digest

        status, by_full, headers = await world.ask()
        assert status == 200
        assert by_full == compute_alone(tmp_path / "tuned" / FULL_NAME) != by_adapter
        assert (headers["x-loraplex-model"], headers["x-loraplex-digest"]) == ("team-x/default@2", digest)
        assert headers["x-loraplex-replica"].startswith(f"{POOL}-")
        # the adapter is still there by its number, and the base's engine knows nothing of the other model
        assert (await world.ask("team-x/default@1"))[1] == by_adapter
        cards = (await world.world.call("GET", "/v1/models", key=world.team)).json()["data"]
        assert ("team-x", "team-x/default@2") in [(card["id"], card["root"]) for card in cards]
        rows = {row["version"]: row for row in await world.world.usage()}
        assert (rows[2]["digest"], rows[2]["key_id"], rows[2]["tenant"]) == (digest, rows[1]["key_id"], "team-x")
        assert rows[2]["completion_tokens"] == rows[1]["completion_tokens"] == NUM_TOKENS

        await check_that_a_stream_outlives_the_way_back(world, public_id)
        assert (await world.ask())[1] == by_adapter
        assert (await world.show(public_id))["state"] == "registered"
        assert (await world.do(public_id, "activate")).json()["state"] == "active"
        engine.kill()
        for _ in range(3):
            assert (await world.ask())[:2] == (503, "no_replica")
            await world.world.gateway.fleet.poll()
        if long(0, 1):
            await check_that_only_these_files_answer(world, port, by_full)
        await check_that_the_commands_agree(world, public_id)
        assert (await world.ask("team-x/default@2"))[:2] == (410, "adapter_retired")


async def check_that_only_these_files_answer(world: Escalating, port: int, by_full: str) -> None:
    """While the pool serves other weights under the same name the answer is 503: never the adapter's."""
    other = write_base(world.world.folder / "other" / FULL_NAME, tiny_llama_config(), seed=5)
    wrong = world.serve_full(pull(str(other), world.world.folder / "others"), port)
    await until(lambda: wrong_is_known(world), 120)
    assert (await world.ask())[:2] == (503, "no_replica")
    wrong.kill()
    world.serve_full(world.full, port)
    await until(lambda: serves(world), 120)
    assert (await world.ask())[1] == by_full


def find_digest(world: Escalating) -> str:
    with Connection(Location(world.world.url, world.admin)) as connection:
        return Escalations(connection).find_digest(POOL)


async def check_that_the_commands_agree(world: Escalating, public_id: str) -> None:
    """The command line's client against the real thing: what it reports, and how it ends the exception."""

    def work() -> list[str]:
        with Connection(Location(world.world.url, world.admin)) as connection:
            client = Escalations(connection)
            report = client.report()
            assert [one["id"] for one in report["data"]] == [public_id]
            closed = client.move(public_id, "close", {"reason": "The next LoRA was enough."})
            assert closed["state"] == "closed"
            return [one.state for one in client.list()]

    assert await asyncio.to_thread(work) == ["closed"]


async def wrong_is_known(world: Escalating) -> bool:
    await world.world.gateway.fleet.poll()
    problems = [replica.problem or "" for replica in world.world.gateway.fleet.view.replicas if replica.pool == POOL]
    return any("registered" in problem for problem in problems)


async def check_that_a_stream_outlives_the_way_back(world: Escalating, public_id: str) -> None:
    """A name is resolved once: a running answer ends on the model that it began with."""
    fields = {"max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    async with world.world.stream("team-x", PROMPT, world.team, **fields) as response:
        assert response.headers["x-loraplex-model"] == "team-x/default@2"
        lines = response.aiter_lines()
        await anext(lines)
        assert (await world.do(public_id, "revert")).json()["state"] == "registered"
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert sum('"text"' in line for line in rest) > 1
    assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 400
