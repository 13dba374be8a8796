"""What a platform of some size looks like from its dashboard: an hour of figures, usage, events, slots. All made up."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from gateway_world import BASE, GatewayWorld
from loraplex.db.tables import gateway_event, tenant, usage
from loraplex.stats.growing import GrowingPiece
from loraplex.stats.piece import COUNTS, MINUTE_S, PIECE_S, EngineSample, Key, find_minute
from loraplex.stats.recorder import StatsRecorder
from loraplex.stats.report import FreshPiece
from loraplex_registry.wire.ids import new_public_id, new_uuid

_SPREADS = {"queue_s": 0.02, "prefill_s": 0.06, "time_to_first_token_s": 0.1, "inter_token_s": 0.018, "request_s": 2.0}
_LENGTHS = {"prompt_len": 300, "completion_len": 90, "request_len": 390}


async def fill_stats(world: GatewayWorld, num_tenants: int, num_adapters: int, *, num_pieces: int = 360) -> None:
    """Write an hour of pieces, and their minutes as a recorder does; the first tenant floods in the last five."""
    rng, now = random.Random(7), int(time.time()) // 10 * 10
    recorder, minute = StatsRecorder(world.gateway.database, "gw_made_up"), GrowingPiece(0)
    replicas = [replica.name for replica in world.gateway.fleet.view.replicas] or ["main-000000"]
    ids = {f"team-{number:03}": str(new_uuid()) for number in range(num_tenants)}
    tenants = await world.rows(tenant)
    ids |= {row["name"]: str(row["id"]) for row in tenants if row["name"] in ids}
    for index in range(num_pieces):
        piece = GrowingPiece(now - (num_pieces - index) * PIECE_S)
        busy = 3.0 if index > num_pieces - 30 else 1.0 + 0.4 * ((index % 90) / 90)
        num_called = num_adapters if index == 0 else min(num_adapters, 12 if index % 6 else 60)
        called = rng.sample(range(num_adapters), num_called)
        for number in [*called, *([0] if busy > 2 and 0 not in called else [])]:
            name = f"team-{number % num_tenants:03}"
            row = piece.find_row(Key(BASE, ids[name], name, f"adapter-{number:03}", rng.choice(replicas)))
            _count(piece, row, rng, busy, is_flood=number % num_tenants == 0 and busy > 2)
        _sample(piece, replicas, rng, busy, index)
        if find_minute(piece.began_at) != minute.began_at:
            if not minute.is_empty:
                await recorder._write(FreshPiece("gw_made_up", MINUTE_S, minute.began_at, minute.freeze()))
            minute = GrowingPiece(find_minute(piece.began_at))
        minute.add(piece.freeze(), piece.began_at - minute.began_at)
        await recorder._write(FreshPiece("gw_made_up", PIECE_S, piece.began_at, piece.freeze()))


def _count(piece: GrowingPiece, row: int, rng: random.Random, busy: float, *, is_flood: bool) -> None:
    num = rng.randint(1, 4) * (12 if is_flood else 1)
    tokens = {"prompt_tokens": 300 * num, "cached_tokens": 90 * num, "completion_tokens": 90 * num}
    num_bad = int(rng.random() < 0.05)
    found = {"requests": num, "requests_ok": num - num_bad, "requests_error": num_bad, **tokens}
    for index, name in enumerate(COUNTS):
        piece.counts[row][index] += found.get(name, 0)
    for index, (name, typical) in enumerate((_SPREADS | _LENGTHS).items()):
        for _ in range(num):
            grows = busy**2 if name in ("queue_s", "time_to_first_token_s") else busy**0.3
            piece.spreads[index].add(row, typical * rng.lognormvariate(0, 0.5) * grows)


def _sample(piece: GrowingPiece, replicas: list[str], rng: random.Random, busy: float, index: int) -> None:
    for replica in replicas:
        samples = [
            EngineSample(
                kv_usage=min(1.0, 0.3 * busy + rng.random() * 0.1),
                waiting=int(max(0.0, busy - 1.5) * 14 + rng.random() * 2),
                running=int(6 * busy + rng.random() * 4),
                slots=8,
                slots_used=8,
            )
            for _ in range(10)
        ]
        growth = [rng.randint(0, 3) if busy > 2 else 0, 4000, 1500, rng.randint(0, 2), rng.randint(0, 2)]
        engine = piece.find_engine(replica, BASE)
        engine.seconds, engine.samples, engine.growth = list(range(10)), samples, growth


async def fill_usage(world: GatewayWorld, num_tenants: int, num_adapters: int, *, num_days: int = 20) -> None:
    """Write settled requests: a few of each adapter a day."""
    rng, now = random.Random(11), datetime.now(UTC)
    ids = {row["name"]: str(row["id"]) for row in await world.rows(tenant)}
    rows: list[dict[str, Any]] = []
    for number in range(num_adapters):
        name = f"team-{number % num_tenants:03}"
        for day in rng.sample(range(num_days), 3):
            at = now - timedelta(days=day, seconds=rng.randint(0, 50))
            rows.append(build_usage(ids.get(name, name), name, f"adapter-{number:03}", at, rng))
    async with world.gateway.database.write() as connection:
        await connection.execute(usage.insert(), rows)


def build_usage(
    tenant_id: str, name: str, adapter: str, at: datetime, rng: random.Random | None = None
) -> dict[str, Any]:
    """One settled request."""
    rng = rng or random.Random(at.isoformat())
    prompt = rng.randint(100, 900_000)
    return {
        "request_id": new_public_id("req"),
        "tenant_id": tenant_id,
        "tenant": name,
        "adapter_id": f"{name}/{adapter}",
        "adapter": adapter,
        "version": rng.randint(1, 3),
        "digest": "sha256:" + "a" * 64,
        "base": BASE,
        "key_id": "key_made_up",
        "route": "/v1/completions",
        "model": f"{name}/{adapter}",
        "is_stream": True,
        "client_request_id": None,
        "tags": None,
        "created_at": at,
        "replica": "http://e",
        "settled_at": at,
        "day": at.date().isoformat(),
        "outcome": rng.choice(["ok", "ok", "ok", "error"]),
        "error_code": None,
        "finish": "stop",
        "prompt_tokens": prompt,
        "cached_tokens": prompt // 3,
        "completion_tokens": rng.randint(10, 200_000),
        "queue_s": 0.1,
        "prefill_s": 0.2,
        "load_s": 0.0,
        "decode_s": rng.random() * 400,
        "preemptions": 0,
        "load_bytes": rng.choice([0, 0, 27_262_976]),
    }


async def fill_tenants(world: GatewayWorld, num_tenants: int) -> None:
    """Create tenants, some with limits."""
    limits = [{"tokens_per_day": 20_000_000, "requests_per_minute": 600}, {"tokens_per_month": 1_000_000}, {}, {}]
    for number in range(num_tenants):
        name = f"team-{number:03}"
        await world.create_tenant(name, limits=limits[number % 4])
        if number % 17 == 16:
            await world.call("PATCH", f"/api/v1/tenants/{name}", json={"state": "suspended"})


async def fill_events(world: GatewayWorld, num_events: int) -> None:
    """Write events of all kinds."""
    now = datetime.now(UTC)
    kinds = ("alias.set", "adapter.version_created", "key.created", "tenant.changed", "fleet.adapter_loaded")
    rows = [
        {
            "id": new_uuid(),
            "public_id": new_public_id("evt"),
            "at": now - timedelta(seconds=num_events - number),
            "action": kinds[number % len(kinds)],
            "tenant_id": None,
            "tenant": f"team-{number % 40:03}",
            "subject": f"team-{number % 40:03}/adapter-{number % 7}@live",
            "actor": "ada",
            "key_id": new_public_id("key"),
            "request_id": new_public_id("req"),
            "details": {"before": {"targets": [{"version": 1, "weight": 100}]}, "after": {"targets": []}},
        }
        for number in range(num_events)
    ]
    async with world.gateway.database.write() as connection:
        await connection.execute(gateway_event.insert(), rows)
