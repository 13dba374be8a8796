"""Names that clients invent are no labels (B120 of the cases), and series of what is deleted end (B121)."""

from __future__ import annotations

import random
import string
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gateway_world import GatewayWorld, enclosed_world
from loraplex.keys.grant import SCOPES

CHATS = ("/v1/chat/completions", "/v1/completions", "/v1/tokenize")
SEED = 7


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with enclosed_world(database_url, tmp_path) as found:
        await found.create_tenant("team-x")
        yield found


async def scrape(world: GatewayWorld) -> set[str]:
    """The series of a scrape, without their values."""
    lines = (await world.call("GET", "/metrics", key=None)).text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")}


def invent(rng: random.Random) -> str:
    """A name of a model, near a real one or not at all."""
    letters = string.ascii_lowercase + string.digits + "-/@:_. \x00\u00fc\U0001f600"
    word = "".join(rng.choices(letters, k=rng.randint(1, 60)))
    return rng.choice([word, f"team-x/{word}", f"team-x@{word}", word.replace("/", "-"), f"team-{word}"])


async def ask(world: GatewayWorld, path: str, key: str, model: str) -> None:
    body = {"model": model, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    response = await world.call("POST", path, key=key, json=body)
    assert response.status_code in (400, 404), response.text
    assert len(response.content) < 4096


@pytest.mark.endure
async def test_b120_names_that_clients_invent_make_no_series(
    world: GatewayWorld, long: Callable[[float, float], float]
) -> None:
    key = await world.create_key("team-x", scopes=list(SCOPES))
    rng = random.Random(SEED)
    for path in CHATS:
        # one that is unknown, and one that is no name
        await ask(world, path, key, "nobody")
        await ask(world, path, key, "\x00")
    await scrape(world)
    before = await scrape(world)
    for _ in range(int(long(200, 10_000))):
        await ask(world, rng.choice(CHATS), key, invent(rng))
    for path in CHATS:
        await ask(world, path, key, "x" * (1 << 20))
    added = await scrape(world) - before
    assert len(added) <= 1, added
    assert max(len(series) for series in await scrape(world)) < 300


async def test_b120_paths_and_methods_that_clients_invent_make_no_series(world: GatewayWorld) -> None:
    rng = random.Random(SEED)
    for method in ("GET", "BREW"):
        await world.call(method, "/nothing")
    await world.call("GET", "/v1/models/nobody")
    await scrape(world)
    before = await scrape(world)
    for _ in range(50):
        word = "".join(rng.choices(string.ascii_lowercase, k=30))
        await world.call(rng.choice(["GET", "BREW", word.upper()]), f"/{word}")
        await world.call("GET", f"/v1/models/{word}")
    assert len(await scrape(world) - before) <= 1


async def test_b121_series_of_deleted_adapters_are_shown_once_more(world: GatewayWorld) -> None:
    await world.push("team-x", "a")
    await world.push("team-x", "b")
    for name in ("a", "b", "base"):
        world.gateway.metrics.count_generation("team-x", name, "ok", prompt_tokens=1, completion_tokens=2)
    await world.call("DELETE", "/api/v1/tenants/team-x/adapters/a")
    await world.gateway.names.ensure_fresh()
    gone = 'loraplex_adapter_requests_total{adapter="a",outcome="ok",tenant="team-x"}'
    first, second = await scrape(world), await scrape(world)
    assert gone in first
    assert {series for series in first - second if "adapter_requests" in series} == {gone}
    assert (await world.call("DELETE", "/api/v1/tenants/team-x?cascade=true")).status_code == 204
    await world.gateway.names.ensure_fresh()
    assert [series for series in await scrape(world) if "team-x" in series]
    assert not [series for series in await scrape(world) if "team-x" in series]


@pytest.mark.endure
async def test_b121_adapters_come_and_go_and_the_scrape_stays_as_it_was(
    world: GatewayWorld, long: Callable[[float, float], float]
) -> None:
    metrics, names = world.gateway.metrics, world.gateway.names
    await world.push("team-x", "first")
    left = set()
    for i in range(int(long(4, 500))):
        name = f"adapter-{i}"
        path = f"/api/v1/tenants/team-x/adapters/{name}"
        assert (await world.call("POST", f"{path}/versions", files=world.last_files())).status_code == 201
        await names.ensure_fresh()
        metrics.count_generation("team-x", name, "ok", prompt_tokens=1, completion_tokens=2)
        assert [series for series in await scrape(world) if f'"{name}"' in series]
        assert (await world.call("DELETE", path)).status_code == 204
        await names.ensure_fresh()
        await scrape(world)
        left |= {series for series in await scrape(world) if "team-x" in series}
    assert not left
