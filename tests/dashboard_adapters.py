"""Many adapters with versions, reports and aliases, written as rows: what pages look like with hundreds of them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from gateway_world import GatewayWorld
from loraplex.db.tables import tenant
from loraplex_registry.adapters.alias_row import set_targets
from loraplex_registry.db.database import Change
from loraplex_registry.db.model import AdapterRow, BaseRow, VersionRow
from loraplex_registry.wire.adapter import Target
from loraplex_registry.wire.ids import new_uuid

_WARNING = {
    "name": "target_modules",
    "verdict": "warn",
    "subject": "c_attn",
    "message": "The base has no module c_attn; PEFT passes over it beside others, and so does this.",
}


async def fill_adapters(world: GatewayWorld, num_tenants: int, num_adapters: int) -> None:
    """Write adapters of `team-000` and so on: most live, some quarantined, some never live, some with a canary."""
    ids = {row["name"]: str(row["id"]) for row in await world.rows(tenant)}

    async def work(change: Change) -> None:
        base = (await change.session.execute(sa.select(BaseRow))).scalars().first()
        assert base is not None
        for number in range(num_adapters):
            name = f"team-{number % num_tenants:03}"
            adapter = AdapterRow(
                id=new_uuid(),
                tenant_id=ids[name],
                tenant=name,
                name=f"adapter-{number:03}",
                base_id=base.id,
                base=base,
                next_number=4,
                created_at=_at(number),
                created_by="ada",
                changed_epoch=change.epoch,
            )
            change.session.add(adapter)
            await change.session.flush()
            versions = [_build_version(adapter, number, version) for version in (1, 2, 3)]
            change.session.add_all(versions)
            await change.session.flush()
            if number % 10 != 7:
                await _add_alias(change, adapter, number)
            _quarantine(versions[-1], number)

    await world.gateway._registry.services.database.change(work)


def _build_version(adapter: AdapterRow, number: int, version: int) -> VersionRow:
    is_newest = version == 3
    state = "retired" if version == 1 and number % 4 == 0 else "ready"
    checks = [{"name": name, "verdict": "pass", "message": "", "subject": ""} for name in ("file_set", "json", "shape")]
    report = {"verdict": "pass", "checks": checks, "honoured": {"r": 16, "lora_alpha": 32}, "refused": {}}
    if is_newest and number % 3 == 0:
        report |= {"verdict": "warn", "checks": [*checks, _WARNING]}
    return VersionRow(
        id=new_uuid(),
        adapter_id=adapter.id,
        number=version,
        kind="lora",
        digest="sha256:" + hashlib.sha256(f"{number}/{version}".encode()).hexdigest(),
        state=state,
        rank=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        num_parameters=13_631_488,
        size_bytes=27_262_976,
        files=[],
        report=report,
        created_at=_at(number) + timedelta(days=version),
        created_by="ada",
        retired_at=_at(number) if state == "retired" else None,
    )


def _quarantine(version: VersionRow, number: int) -> None:
    """Only what was ready can be what an alias leads to."""
    if number % 40 == 5:
        since = _at(number).isoformat().replace("+00:00", "Z")
        version.state = "quarantined"
        version.quarantine = {"reason": "load_failed", "message": "The bytes cannot be loaded.", "since": since}


async def _add_alias(change: Change, adapter: AdapterRow, number: int) -> None:
    canary = (Target(2, 90), Target(3, 10))
    for targets in ((Target(2, 100),), canary if number % 8 == 0 else (Target(3, 100),)):
        await set_targets(change, adapter, "live", targets, "set", "ada")
    await change.session.flush()


def _at(number: int) -> datetime:
    return datetime.now(UTC) - timedelta(days=20, minutes=number)
