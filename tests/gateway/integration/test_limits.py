"""Limits on calls, over HTTP: what is admitted, what a refusal says, what is given back, what a restart remembers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gateway_world import BASE, GatewayWorld, running_world, until
from limit_calls import TEAM, Streams, ask, code_of, make_team
from loraplex.db.tables import quota_debt
from loraplex.errors import UnavailableError
from loraplex.gateway.limiting import RecountingLedger
from loraplex.usage.ledger import Ledger
from loraplex.usage.record import Done, RequestRow, Settlement
from loraplex.usage.recovery import find_open_requests, settle_open_requests


@pytest.fixture
def dialect() -> str:
    return "sqlite"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[GatewayWorld]:
    async with running_world(database_url, tmp_path) as found:
        yield found


@pytest.fixture
async def streams(world: GatewayWorld) -> AsyncIterator[Streams]:
    found = Streams(world)
    yield found
    world.engine.go_on.set()
    await found.leave()


async def test_calls_at_once_never_reserve_more_than_the_limit(world: GatewayWorld, streams: Streams) -> None:
    key = await make_team(world, tokens_per_minute=100)
    await asyncio.gather(*(streams.open(key) for _ in range(20)))
    assert len(streams.opened) == 2
    assert {(answer.status_code, code_of(answer)) for answer in streams.refused} == {(429, "rate_limit_exceeded")}
    assert all(1 <= int(answer.headers["retry-after"]) <= 61 for answer in streams.refused)
    assert len(world.engine.calls) == 2
    await streams.finish()
    # each cost a prompt of 7 and one token
    answer = await ask(world, key, max_tokens=82)
    assert (answer.status_code, answer.headers["x-ratelimit-remaining-tokens"]) == (200, "0")
    assert (await ask(world, key)).headers["x-ratelimit-remaining-tokens"] == str(100 - 16 - 12 - 50)


async def test_what_is_refused_is_no_load_and_makes_no_adapter_hot(world: GatewayWorld) -> None:
    key = await make_team(world, requests_per_minute=1)
    await world.push(TEAM)
    traffic, placed = world.gateway.fleet.traffic, list[str]()
    world.gateway.fleet.on_placed = placed.append
    (before,) = traffic.demands(BASE)
    for route in ("/v1/completions", "/v1/tokenize"):
        for _ in range(10):
            await world.call("POST", route, key=key, json={"model": TEAM, "prompt": "answer"})
    assert len(world.engine.calls) == len(placed) == 1
    (after,) = traffic.demands(BASE)
    assert after.count < before.count + 1.5


async def test_a_refused_call_uses_nothing_up(world: GatewayWorld, streams: Streams) -> None:
    key = await make_team(world, requests_per_minute=2, concurrent_requests=1)
    await streams.open(key)
    for _ in range(5):
        refused = await ask(world, key)
        assert (refused.status_code, code_of(refused)) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-ratelimit-remaining-requests"] == "1"
    await streams.finish()
    # the place is free before the client can know that the answer has ended
    assert (await ask(world, key)).status_code == 200
    last = await ask(world, key)
    assert last.status_code == 429
    assert 50 <= int(last.headers["retry-after"]) <= 61
    misspelt = await world.complete(BASE, "answer", key, fields={"max_tokenz": 1})
    assert (misspelt.status_code, code_of(misspelt)) == (400, "unknown_parameter"), "that no wait will mend"


@pytest.mark.endure
async def test_each_limit_holds_its_own_figure(world: GatewayWorld, long: Callable[[float, float], float]) -> None:
    """For three minutes; a sample sees the first of them begin."""
    by_requests = await make_team(world, "team-x", requests_per_minute=20, tokens_per_minute=20 * 12 + 9)
    by_tokens = await make_team(world, "team-y", requests_per_minute=20, tokens_per_minute=15 * 12 + 9)
    seconds = long(3.5, 180)
    num_minutes = 1 + seconds // 61
    num_answered = {by_requests: 0, by_tokens: 0}
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        for key in num_answered:
            # reserves 12, and costs as much
            num_answered[key] += (await ask(world, key, max_tokens=10)).status_code == 200
        await asyncio.sleep(0.01)
    assert num_minutes * 19 <= num_answered[by_requests] <= num_minutes * 20
    assert num_minutes * 14.25 <= num_answered[by_tokens] <= num_minutes * 15


async def test_a_refusal_says_what_it_is_and_when_to_come_again(world: GatewayWorld) -> None:
    key = await make_team(world, tokens_per_minute=60)
    first = await ask(world, key)
    assert first.headers["x-ratelimit-limit-tokens"] == "60"
    assert first.headers["x-ratelimit-remaining-tokens"] == "10"
    assert re.fullmatch(r"1m0\.?\d*s", first.headers["x-ratelimit-reset-tokens"])
    assert "x-ratelimit-limit-requests" not in first.headers
    refused = await ask(world, key, max_tokens=58)
    error = refused.json()["error"]
    wait_s = int(refused.headers["retry-after"])
    assert error == {
        "message": "This tenant may use 60 tokens a minute; 48 are left, and this request may need 60; try again in "
        f"{wait_s} s.",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert "x-should-retry" not in refused.headers
    never = await ask(world, key, max_tokens=59)
    assert never.status_code == 429
    assert never.headers["x-should-retry"] == "false"
    assert "ask for fewer with max_tokens" in never.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "num_requests", "num_tokens"),
    [
        ("refuse", 0, 0),
        ("refuse 503 adapter_loading 1", 0, 0),
        # what such an engine has generated is in usage, too
        ("other", 0, 12),
        ("refuse 400 invalid_request_error 1", 1, 0),
    ],
)
async def test_a_call_that_the_platform_failed_is_given_back(
    world: GatewayWorld, prompt: str, num_requests: int, num_tokens: int
) -> None:
    key = await make_team(world, requests_per_minute=4, tokens_per_minute=1000, concurrent_requests=1)
    assert (await ask(world, key, prompt)).status_code >= 400
    answer = await ask(world, key)
    assert answer.headers["x-ratelimit-remaining-requests"] == str(3 - num_requests)
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(950 - num_tokens)


async def test_a_database_that_is_away_and_an_engine_that_is_gone_cost_nothing(
    world: GatewayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await make_team(world, requests_per_minute=2, concurrent_requests=1)

    async def fail(self: Ledger, row: Any) -> None:
        raise UnavailableError

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "open", fail)
        for _ in range(3):
            assert (await ask(world, key)).status_code == 503
    with monkeypatch.context() as patch:
        patch.setattr(type(world.gateway.fleet), "choose", lambda *_, **__: None)
        for _ in range(3):
            assert (await ask(world, key)).status_code == 503
    assert (await ask(world, key)).headers["x-ratelimit-remaining-requests"] == "1"


async def test_who_leaves_pays_for_what_was_generated_and_frees_the_place(
    world: GatewayWorld, streams: Streams
) -> None:
    key = await make_team(world, tokens_per_minute=1000, concurrent_requests=1)
    await streams.open(key, max_tokens=900)
    assert (await ask(world, key)).status_code == 429
    await streams.leave()

    async def is_free() -> bool:
        return (await ask(world, key)).status_code == 200

    await until(is_free)
    row = (await world.usage())[0]
    assert (row["outcome"], row["prompt_tokens"], row["completion_tokens"]) == ("cancelled", 7, 1)
    # 8 of the one that left, 12 of the one after it
    assert (await ask(world, key)).headers["x-ratelimit-remaining-tokens"] == str(1000 - 8 - 12 - 50)


async def test_a_deadline_gives_all_back(world: GatewayWorld) -> None:
    key = await make_team(world, tokens_per_minute=1000, concurrent_requests=1)
    late = await world.complete(BASE, "wait", key, headers={"x-request-timeout": "0.2"})
    assert (late.status_code, code_of(late)) == (504, "deadline_exceeded")
    assert (await ask(world, key)).headers["x-ratelimit-remaining-tokens"] == "950"


async def test_what_cost_more_than_was_reserved_is_owed(world: GatewayWorld) -> None:
    key = await make_team(world, tokens_per_minute=20)
    # reserves 3 and costs 12, of which 9 are owed
    assert (await ask(world, key, max_tokens=1)).status_code == 200
    second = await ask(world, key, max_tokens=1)
    assert second.headers["x-ratelimit-remaining-tokens"] == str(20 - 12 - 3)
    # 24 were used: the minute is full, and the next one begins with 4
    refused = await ask(world, key, max_tokens=1)
    assert (refused.status_code, refused.headers["x-ratelimit-remaining-tokens"]) == (429, "0")
    assert 55 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-ratelimit-reset-tokens"].startswith(("2m", "1m5"))


async def test_keys_adapters_and_teams_each_have_their_own(world: GatewayWorld) -> None:
    await world.create_tenant(TEAM, limits={"requests_per_minute": 5})
    narrow = await world.create_key(TEAM, limits={"requests_per_minute": 1})
    wide = await world.create_key(TEAM)
    await world.push(TEAM, "style")
    patched = await world.call(
        "PATCH", f"/api/v1/tenants/{TEAM}/adapters/style", json={"limits": {"requests_per_minute": 2}}
    )
    assert patched.status_code == 200, patched.text
    assert (await ask(world, narrow)).status_code == 200
    refused = await ask(world, narrow)
    assert refused.json()["error"]["message"].startswith("This key may use 1 requests a minute")
    for _ in range(2):
        assert (await world.complete(f"{TEAM}/style", "answer", wide)).status_code == 200
    refused = await world.complete(f"{TEAM}/style", "answer", wide)
    assert refused.json()["error"]["message"].startswith("This adapter may use 2 requests a minute")
    for _ in range(2):
        assert (await ask(world, wide)).status_code == 200
    refused = await ask(world, wide)
    assert refused.json()["error"]["message"].startswith("This tenant may use 5 requests a minute")
    # another team has nothing to do with it
    other = await make_team(world, "team-y")
    assert "x-ratelimit-limit-requests" not in (await ask(world, other)).headers


async def test_a_changed_limit_holds_for_the_next_request(world: GatewayWorld) -> None:
    key = await make_team(world, requests_per_minute=1)
    assert (await ask(world, key)).status_code == 200
    assert (await ask(world, key)).status_code == 429
    await world.call("PATCH", f"/api/v1/tenants/{TEAM}", json={"limits": {"requests_per_minute": 2}})
    assert (await ask(world, key)).status_code == 200
    assert (await ask(world, key)).status_code == 429
    await world.call("PATCH", f"/api/v1/tenants/{TEAM}", json={"limits": {"requests_per_minute": None}})
    assert (await ask(world, key)).status_code == 200


async def test_tokenizing_is_a_request_without_tokens(world: GatewayWorld) -> None:
    key = await make_team(world, requests_per_minute=2, tokens_per_minute=60)
    answer = await world.call("POST", "/v1/tokenize", key=key, json={"model": BASE, "prompt": "answer"})
    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    assert answer.headers["x-ratelimit-remaining-tokens"] == "60"


async def use_yesterday(world: GatewayWorld) -> None:
    """Write a row of another day beside those of today."""
    last = (await world.usage())[0]
    fields = {name: last[name] for name in RequestRow.__struct_fields__}
    row = RequestRow(**fields | {"request_id": "req_old", "created_at": datetime.now(UTC) - timedelta(days=1)})
    done = Done(prompt_tokens=40, completion_tokens=40)
    await world.gateway.ledger.settle(row, Settlement(outcome="ok", done=done))


async def test_days_are_counted_from_usage_whatever_has_restarted(database_url: str, tmp_path: Path) -> None:
    async with running_world(database_url, tmp_path) as world:
        key = await make_team(world)
        for _ in range(2):
            await ask(world, key)
        await use_yesterday(world)
        await world.call("PATCH", f"/api/v1/tenants/{TEAM}", json={"limits": {"tokens_per_day": 100}})
        assert (await ask(world, key)).headers["x-ratelimit-remaining-tokens"] == str(100 - 24 - 50)
    async with running_world(database_url, tmp_path) as world:
        assert (await ask(world, key)).headers["x-ratelimit-remaining-tokens"] == str(100 - 36 - 50)
        for _ in range(2):
            await ask(world, key, max_tokens=10)
        refused = await ask(world, key, max_tokens=27)
        assert (refused.status_code, code_of(refused)) == (429, "quota_exceeded")
        now = datetime.now(UTC)
        midnight = datetime(now.year, now.month, now.day, tzinfo=UTC) + timedelta(days=1)
        assert abs(int(refused.headers["retry-after"]) - (midnight - now).total_seconds()) < 3


async def test_a_restart_forgets_no_debt(database_url: str, tmp_path: Path) -> None:
    async with running_world(database_url, tmp_path) as world:
        key = await make_team(world, tokens_per_day=20)
        for _ in range(2):
            # reserves 3 and costs 12
            await ask(world, key, max_tokens=1)
        (debt,) = await world.rows(quota_debt)
        assert (debt["carried"], debt["owed"]) == (0, 4)
        async with world.gateway.database.write() as connection:
            await connection.execute(sa.update(quota_debt).values(period=debt["period"] - 1))
    async with running_world(database_url, tmp_path) as world:
        await world.call("PATCH", f"/api/v1/tenants/{TEAM}", json={"limits": {"tokens_per_day": 100}})
        assert (await ask(world, key)).headers["x-ratelimit-remaining-tokens"] == str(100 - 24 - 4 - 50)


async def test_what_another_gateway_left_open_counts_when_it_is_settled(world: GatewayWorld) -> None:
    key = await make_team(world, tokens_per_day=100, concurrent_requests=1)
    await ask(world, key)
    last = (await world.usage())[0]
    row = RequestRow(**{name: last[name] for name in RequestRow.__struct_fields__} | {"request_id": "req_late"})
    await world.gateway.ledger.open(row)

    async def find(row: RequestRow) -> tuple[Done, str]:
        return Done(prompt_tokens=9, completion_tokens=11, finish="stop"), row.replica

    found = await find_open_requests(world.gateway.database, datetime.now(UTC) + timedelta(seconds=1))
    await settle_open_requests(
        RecountingLedger(world.gateway.ledger, world.gateway.limiter, world.gateway.directory), found, find
    )
    assert (await ask(world, key)).headers["x-ratelimit-remaining-tokens"] == str(100 - 12 - 20 - 50)


async def test_a_flood_of_first_calls_counts_what_was_used_once(world: GatewayWorld) -> None:
    key = await make_team(world, tokens_per_month=1000)
    answers = await asyncio.gather(*(ask(world, key) for _ in range(30)))
    assert {answer.status_code for answer in answers} <= {200, 429}
    num_answered = sum(answer.status_code == 200 for answer in answers)
    assert num_answered >= 20
    last = await ask(world, key, max_tokens=1)
    assert last.headers["x-ratelimit-remaining-tokens"] == str(1000 - 12 * num_answered - 3)


async def test_refusals_are_counted_by_their_code(world: GatewayWorld) -> None:
    key = await make_team(world, requests_per_minute=1)
    for _ in range(3):
        await ask(world, key)
    text = world.gateway.metrics.render(world.gateway.fleet.view).decode()
    assert 'loraplex_rejected_total{reason="rate_limit_exceeded"} 2.0' in text
    assert "loraplex_limits_degraded 0.0" in text
