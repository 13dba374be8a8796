"""Escalations for tests: a gateway with a pool for a full model, people with keys of different hands, their bodies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx

from gateway_world import BASE, GatewayWorld, running_world
from scripted_engine import ScriptedEngine, running_engine

POOL, MODEL = "team-x-full", "team-x-full-v1"
FULL = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64


def build_evidence(**changes: Any) -> dict[str, Any]:
    """An evaluation that a LoRA fails."""
    fields = {
        "evaluation": "helpdesk-2027",
        "data_digest": "sha256:" + "d" * 64,
        "num_samples": 1200,
        "metric": "exact_match",
        "base": 0.40,
        "lora": 0.55,
        "target": 0.70,
        "ranks_tried": [{"rank": 8, "value": 0.52}, {"rank": 32, "value": 0.55}],
    }
    return fields | changes


def in_days(days: float) -> str:
    """A time from now."""
    return (datetime.now(UTC) + timedelta(days=days)).isoformat()


def build_approval(**changes: Any) -> dict[str, Any]:
    """What an administrator agrees to."""
    fields = {
        "owner": "grace",
        "justification": "Contracts need it.",
        "budget_per_month": 2500.50,
        "currency": "EUR",
        "review_at": in_days(30),
    }
    return fields | changes


class EscalationWorld:
    """People: `team` asks (its key was issued by ada), `grace` approves (issued by ada's predecessor)."""

    def __init__(self, world: GatewayWorld, engine: ScriptedEngine) -> None:
        self.world = world
        self.engine = engine
        self.team = self.admin = self.other_team = ""

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        return self.world.url

    async def people(self) -> None:
        """Make tenants, keys and a live adapter."""
        await self.world.create_tenant("team-x")
        await self.world.create_tenant("team-y")
        await self.world.create_tenant("staff")
        ada = await self.world.create_key("staff", role="admin", owner="ada")
        self.admin = await self.world.create_key("staff", role="admin", owner="grace")
        scopes = ["infer", "adapters:read", "adapters:write", "escalations:write"]
        body = {"name": "app", "owner": "tina", "scopes": scopes}
        answer = await self.world.call("POST", "/api/v1/tenants/team-x/keys", key=ada, json=body)
        self.team = answer.json()["key"]
        self.other_team = await self.world.create_key("team-y", owner="yves", scopes=scopes)
        await self.world.push("team-x")

    async def open(
        self, key: str | None = None, headers: dict[str, str] | None = None, **changes: Any
    ) -> httpx.Response:
        """Ask."""
        body = {"adapter": "default", "evidence": build_evidence(), "reason": "The domain is far away."} | changes
        path = "/api/v1/tenants/team-x/escalations"
        return await self.world.call("POST", path, key=key or self.team, json=body, headers=headers or {})

    async def do(self, escalation: str, verb: str, key: str | None = None, **body: Any) -> httpx.Response:
        """Move one, as the administrator unless told."""
        options = {"json": body} if body else {}
        return await self.world.call(
            "POST", f"/api/v1/escalations/{escalation}/{verb}", key=key or self.admin, **options
        )

    async def show(self, escalation: str, key: str | None = None) -> dict[str, Any]:
        """Look at one."""
        answer = await self.world.call("GET", f"/api/v1/escalations/{escalation}", key=key or self.admin)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def lead_to(self, state: str, **approval: Any) -> str:
        """Return the id of an escalation that was led to this state."""
        opened = await self.open()
        assert opened.status_code == 201, opened.text
        escalation: str = opened.json()["id"]
        steps: dict[str, dict[str, Any]] = {
            "approve": build_approval(**approval),
            "register": {"pool": POOL, "digest": FULL},
            "activate": {"wait_s": 5},
        }
        for verb, reached in (("approve", "approved"), ("register", "registered"), ("activate", "active")):
            if (await self.show(escalation))["state"] == state:
                break
            answer = await self.do(escalation, verb, **steps[verb])
            assert (answer.status_code, answer.json().get("state")) == (200, reached), answer.text
        return escalation

    async def end_all(self) -> None:
        """Close what is open."""
        listed = await self.world.call("GET", "/api/v1/escalations")
        for one in listed.json()["data"]:
            if one["verbs"]:
                answer = await self.world.call("POST", f"/api/v1/escalations/{one['id']}/close")
                assert answer.status_code == 200, answer.text

    async def live(self) -> list[tuple[int, int]]:
        """What the adapter's name means."""
        path = "/api/v1/tenants/team-x/adapters/default/aliases/live"
        answer = await self.world.call("GET", path, key=self.team)
        return [(one["version"], one["weight"]) for one in answer.json().get("targets", [])]


@asynccontextmanager
async def running_escalations(database_url: str, folder: Path) -> AsyncIterator[EscalationWorld]:
    """Yield a gateway with one engine for the base and one pool for a full model."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running_engine())
        base_engine = await stack.enter_async_context(running_engine())
        engine.serve_full(MODEL, FULL)
        pools = {
            "main": {"base": BASE, "engines": [base_engine.url]},
            POOL: {"model": MODEL, "engines": [engine.url]},
            "spare-full": {"model": "spare", "engines": []},
        }
        world = await stack.enter_async_context(running_world(database_url, folder, 0, pools=json.dumps(pools)))
        world.engines.append(base_engine)
        found = EscalationWorld(world, engine)
        await found.people()
        yield found
