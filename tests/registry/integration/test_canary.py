"""Canaries over two gateways' names on one database: shares, constancy over gateways and restarts, growth."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from loraplex.gateway.names import NameIndex
from loraplex.gateway.resolution import Caller, resolve
from loraplex_registry.adapters.alias_row import set_targets
from loraplex_registry.adapters.page import PageOrder
from loraplex_registry.adapters.tenant import TenantRef
from loraplex_registry.aliases import Precondition
from loraplex_registry.app import Registry, create_registry
from loraplex_registry.db.database import Change
from loraplex_registry.db.model import AdapterRow, AliasRow, VersionRow
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.wire.adapter import Target
from loraplex_registry.wire.identity import Identity
from registry_world import ThreadChecker, build_tiny_spec

TENANT = TenantRef("id-team-a", "team-a")
BY = Identity(
    role="tenant", tenant_id="id-team-a", tenant="team-a", scopes=(), key_id="k", actor="a", request_id="req_test"
)
ALIAS_ID = uuid.UUID("0195d3a0-0000-7000-8000-000000000001")
KEYS = [f"user-{number}" for number in range(10_000)]


class Gateway:
    """What a gateway knows of names, over a registry of its own process."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.names = NameIndex(registry.names_delta, lambda: registry.epoch.current, lambda name: f"id-{name}")

    async def choose(self) -> dict[str, int]:
        """The version that each key gets."""
        await self.registry.services.database.refresh_epoch()
        await self.names.ensure_fresh()
        caller = Caller(tenant="team-a", bases=None)
        found = {key: resolve("team-a/style", caller, self.names, key).version for key in KEYS}
        return {key: version.number for key, version in found.items() if version is not None}

    async def put(self, *weights: int) -> None:
        """Let `live` target versions 1, 2, ... with these weights."""
        targets = [Target(number, weight) for number, weight in enumerate(weights, 1)]
        seen = Precondition(any_revision=True)
        await self.registry.services.aliases.put(TENANT, "style", "live", targets, seen, BY)


@pytest.fixture(autouse=True)
def _known_alias_id() -> Iterator[None]:
    """Shares of 10,000 keys lie within 1 % for about 98 of 100 random ids; a test has to know its own."""

    def give_id(mapper: Any, connection: Any, alias: AliasRow) -> None:
        alias.id = ALIAS_ID

    sa.event.listen(AliasRow, "before_insert", give_id)
    yield
    sa.event.remove(AliasRow, "before_insert", give_id)


@pytest.fixture
def settings(registry_settings: RegistrySettings) -> RegistrySettings:
    return replace(registry_settings, parity_gate="off")


@asynccontextmanager
async def running(settings: RegistrySettings) -> AsyncIterator[Gateway]:
    registry = create_registry(settings, checker=ThreadChecker())
    await registry.start()
    try:
        yield Gateway(registry)
    finally:
        await registry.stop()


async def write_versions(registry: Registry, num_versions: int) -> None:
    spec, _ = await registry.register_base(build_tiny_spec(), BY)

    async def work(change: Change) -> None:
        base_id = (await change.session.execute(sa.text("SELECT id FROM base"))).scalar_one()
        adapter = AdapterRow(
            tenant_id=TENANT.id, tenant=TENANT.name, name="style", base_id=uuid.UUID(str(base_id)), is_default=False,
            next_number=num_versions + 1, created_by="a", changed_epoch=change.epoch,
        )  # fmt: skip
        change.session.add(adapter)
        await change.session.flush()
        await change.session.refresh(adapter)
        for number in range(1, num_versions + 1):
            change.session.add(
                VersionRow(
                    adapter_id=adapter.id, adapter=adapter, number=number, kind="lora", state="ready", rank=1,
                    digest=f"sha256:{number:064x}", target_modules=[], num_parameters=1, size_bytes=1, files=[],
                    report={"verdict": "pass", "checks": []}, created_by="a",
                )
            )  # fmt: skip
        await change.session.flush()
        await set_targets(change, adapter, "live", [Target(1, 100)], "upload", "a")

    await registry.services.database.change(work)
    assert spec.name


def shares(choice: dict[str, int]) -> dict[int, float]:
    counts = Counter(choice.values())
    return {version: 100 * counts[version] / len(KEYS) for version in counts}


async def test_shares_hold_at_every_gateway_and_after_restarts(settings: RegistrySettings) -> None:
    async with running(settings) as first, running(settings) as second:
        await write_versions(first.registry, 3)
        assert set((await first.choose()).values()) == {1}
        await first.put(90, 10)
        tenth = await first.choose()
        assert shares(tenth) == pytest.approx({1: 90, 2: 10}, abs=1)
        assert await second.choose() == tenth, "the same key has the same version at another gateway"
        await second.put(80, 20)
        fifth = await first.choose()
        assert shares(fifth) == pytest.approx({1: 80, 2: 20}, abs=1)
        moved_back = [key for key in KEYS if tenth[key] == 2 and fifth[key] != 2]
        assert moved_back == [], "nobody who had the canary loses it as it grows"
        await second.put(60, 25, 15)
        three = await second.choose()
        assert shares(three) == pytest.approx({1: 60, 2: 25, 3: 15}, abs=1)
    async with running(settings) as again:
        assert await again.choose() == three, "a restart moves nobody"
        rolled = await again.registry.services.aliases.roll_back(TENANT, "style", "live", Precondition(), BY)
        assert rolled.targets == [Target(1, 80), Target(2, 20)]
        assert await again.choose() == fifth, "a rollback gives each key what it had"
        history = await again.registry.services.aliases.history(TENANT, "style", "live", PageOrder())
        weights = [tuple(target.weight for target in change.targets) for change in history.data]
        assert weights == [(80, 20), (60, 25, 15), (80, 20), (90, 10), (100,)]
