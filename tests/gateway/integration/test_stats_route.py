"""`GET /api/v1/stats` over HTTP with scripted engines: what was served is told, to each key its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway_world import BASE, GatewayWorld, check_error, running_world

pytestmark = pytest.mark.usefixtures("still_clock")
STATS = "/api/v1/stats"
QUANTILES = {"count", "mean", "p50", "p95", "p99", "max"}


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path, num_engines=2) as running:
        for name in ("team-x", "team-y"):
            await running.create_tenant(name)
        yield running


@pytest.fixture
def dialect() -> str:
    return "sqlite"


async def ask(world: GatewayWorld, key: str | None = None, **params: Any) -> dict[str, Any]:
    keys = {} if key is None else {"key": key}
    response = await world.call("GET", STATS, params=params, **keys)
    assert response.status_code == 200, response.text
    report: dict[str, Any] = response.json()
    return report


async def stream(world: GatewayWorld, model: str, key: str) -> str:
    async with world.stream(model, "answer", key) as response:
        assert response.status_code == 200
        await response.aread()
        return response.headers["x-loraplex-replica"]


async def test_what_was_served_is_told(world: GatewayWorld) -> None:
    key = await world.create_key("team-x", owner="dev")
    await world.push("team-x")
    replica = await stream(world, "team-x", key)
    await world.complete("team-x", "answer", key)
    for engine, waiting in zip(world.engines, (3, 0), strict=True):
        engine.state_changes |= {
            "waiting": waiting,
            "kv": {"num_blocks": 10, "num_free": 4, "block_size": 16},
            "preemptions": 5,
            "prefix_cache": {"queries": 100, "hits": 40},
        }
    await world.gateway.fleet.poll()
    report = await ask(world, by="adapter", window="1m", series="true")
    (row,) = report["data"]
    named = {name: row[name] for name in ("base", "tenant", "adapter", "replica", "requests", "requests_ok", "engines")}
    assert named == {
        "base": BASE,
        "tenant": "team-x",
        "adapter": "default",
        "replica": None,
        "requests": 2,
        "requests_ok": 2,
        "engines": None,
    }
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (14, 4, 10)
    assert row["request_len"] | {"p50": 0, "p95": 0, "p99": 0} == {
        "count": 2, "mean": 12.0, "p50": 0, "p95": 0, "p99": 0, "max": 12.0
    }  # fmt: skip
    assert set(row["time_to_first_token_s"]) == QUANTILES
    assert 0 < row["time_to_first_token_s"]["max"] < 30
    assert 0 < row["request_s"]["max"] < 30
    engines = report["total"]["engines"]
    assert (engines["replicas"], engines["waiting_now"]) == (2, 3)
    assert (engines["kv_usage_now"], engines["preemptions"], engines["prefix_hits"]) == (0.6, 10, 80)
    assert len(report["series"]) == 7
    assert sum(point["requests"] for point in report["series"]) == 2
    assert report["series"][-1]["engines"]["waiting_now"] == 3
    by_replica = await ask(world, by="replica")
    assert {row["replica"] for row in by_replica["data"]} == {
        replica.name for replica in world.gateway.fleet.view.replicas
    }
    assert [row["requests"] for row in by_replica["data"] if row["replica"] == replica] == [2]
    assert by_replica["series"] is None


async def test_each_tenant_sees_its_own_requests_and_no_engine(world: GatewayWorld) -> None:
    keys = {
        name: await world.create_key(name, owner="dev", scopes=["infer", "usage:read"]) for name in ("team-x", "team-y")
    }
    for name in keys:
        await world.push(name)
    await stream(world, "team-x", keys["team-x"])
    for _ in range(3):
        await world.complete("team-y", "answer", keys["team-y"])
    # whose adapter it is, is whose requests they are; a base's are the caller's
    await world.complete(BASE, "answer", keys["team-x"])
    everything = await ask(world, by="tenant")
    assert {row["tenant"]: row["requests"] for row in everything["data"]} == {"team-x": 2, "team-y": 3}
    for by in ("base", "tenant", "adapter", "replica"):
        report = await ask(world, keys["team-x"], by=by, series="true")
        shown = [*report["data"], report["total"], *report["series"]]
        assert all(one["engines"] is None for one in shown)
        assert "team-y" not in str(report)
        assert sum(row["requests"] for row in report["data"]) == report["total"]["requests"] == 2
        assert sum(point["requests"] for point in report["series"]) == 2
    own = await ask(world, keys["team-x"], tenant="team-x")
    assert own["total"] == (await ask(world, tenant="team-x"))["total"]
    response = await world.call("GET", STATS, key=keys["team-x"], params={"tenant": "team-y"})
    check_error(response, 404, "not_found", "tenant")


async def test_filters_leave_out_all_others(world: GatewayWorld) -> None:
    key = await world.create_key("team-x", owner="dev")
    for adapter in ("one", "two"):
        await world.push("team-x", adapter)
    first = await stream(world, "team-x/one", key)
    await world.complete("team-x/two", "answer", key)
    assert (await ask(world, adapter="one"))["total"]["requests"] == 1
    assert (await ask(world, base=BASE))["total"]["requests"] == 2
    assert (await ask(world, base="no-such-base"))["total"]["requests"] == 0
    of_replica = await ask(world, replica=first)
    assert of_replica["total"]["engines"]["replicas"] == 1


async def test_a_key_without_the_scope_is_refused(world: GatewayWorld) -> None:
    key = await world.create_key("team-x", owner="dev", scopes=["infer"])
    check_error(await world.call("GET", STATS, key=key), 403, "permission_denied")
    check_error(await world.call("GET", STATS, key=None), 401, "invalid_api_key")


async def test_what_makes_no_sense_is_refused_by_name(world: GatewayWorld) -> None:
    for name, value in (
        ("window", "2h"),
        ("window", ""),
        ("by", "key"),
        ("series", "yes"),
        ("base", ""),
        ("adapter", "a" * 101),
    ):
        check_error(await world.call("GET", STATS, params={name: value}), 400, "invalid_request_error", name)
