"""Gathers what advice rests on: what engines say of themselves, names, tenants' limits, and what the database has."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from loraplex.advise.advise import give_advice
from loraplex.advise.fact import AdapterFacts, EngineFacts, Facts, PrefixFacts, TenantFacts
from loraplex.advise.finding import Finding
from loraplex.advise.reading import Counted, read_calls, read_counted, read_tokens
from loraplex.db.database import Database
from loraplex.fleet.fleet import Fleet
from loraplex.fleet.view import Replica
from loraplex.gateway.directory import Directory, TenantEntry
from loraplex.gateway.names import NameIndex
from loraplex_registry.wire.adapter import AdapterName

_LIVE = "live"
_DAYS = 7


class Advising:
    """Gives advice on this platform, or to one tenant; calls of adapters are counted for `outcome_days`."""

    def __init__(
        self, database: Database, fleet: Fleet, names: NameIndex, directory: Directory, outcome_days: int
    ) -> None:
        self._database = database
        self._fleet = fleet
        self._names = names
        self._directory = directory
        self._outcome_days = outcome_days

    async def advise(self, tenant_id: str | None) -> list[Finding]:
        """Return what was found out, advice first.

        Args:
            tenant_id: The tenant who asks, or whom a platform key asks for; None: the platform.

        Raises:
            UnavailableError: The database does not answer.
        """
        facts = await self.gather(tenant_id, datetime.now(UTC))
        return await asyncio.to_thread(give_advice, facts)

    async def gather(self, tenant_id: str | None, now: datetime) -> Facts:
        """Return the facts as they are now; those of a tenant hold nothing of another one."""
        await self._names.ensure_fresh()
        calls = await read_calls(self._database, now - timedelta(days=_DAYS), tenant_id)
        counted = await read_counted(self._database)
        today, this_month = await read_tokens(self._database, now, tenant_id)
        adapters = [
            adapter
            for adapter in self._names.adapters()
            if not adapter.deleted and _LIVE in adapter.aliases and tenant_id in (None, adapter.tenant_id)
        ]
        return Facts(
            now=now,
            calls=calls,
            days=_DAYS,
            num_calls=sum(counted[one.adapter_id].num_calls for one in adapters if one.adapter_id in counted),
            remembered_days=self._outcome_days,
            engines=[read_engine(replica) for replica in self._fleet.view.replicas if replica.problem is None],
            adapters=[_describe_adapter(one, counted.get(one.adapter_id)) for one in adapters],
            tenants=[
                TenantFacts(
                    tenant_id=str(tenant.id),
                    name=tenant.name,
                    limits=_list_limits(tenant),
                    tokens_today=today.get(tenant.name, 0),
                    tokens_this_month=this_month.get(tenant.name, 0),
                )
                for tenant in self._directory.tenants()
                if tenant_id in (None, str(tenant.id))
            ],
            tenant_id=tenant_id,
        )


def read_engine(replica: Replica) -> EngineFacts:
    """Return an engine's facts from its state; one of another release says less, or says it otherwise."""
    state = replica.state
    model, kv = _object(state, "model"), _object(state, "kv")
    history = _object(state, "prefix_history")
    num_blocks, block_size = _number(kv, "num_blocks"), _number(kv, "block_size")
    is_caching = history.get("is_caching")
    return EngineFacts(
        name=replica.name,
        url=replica.url,
        base=replica.base or replica.model or "",
        max_model_len=_number(model, "max_model_len"),
        max_num_seqs=replica.max_running,
        max_loras=_number(model, "max_loras"),
        kv_tokens=num_blocks * block_size if num_blocks and block_size else None,
        kv_bytes=_number(_object(state, "memory"), "kv_bytes"),
        preemptions=_number(state, "preemptions") or 0,
        preempted_at=_number(state, "preempted_at"),
        is_caching=is_caching if isinstance(is_caching, bool) else None,
        prefixes=_read_prefixes(history),
        tenant_prefixes=_read_tenants(history),
    )


def _read_tenants(history: dict[str, Any]) -> dict[str, PrefixFacts]:
    listed = history.get("tenants")
    found = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    forgotten = {"forgotten_blocks": history.get("forgotten_blocks", 0)}
    return {one["tenant_id"]: _read_prefixes(one | forgotten) for one in found if isinstance(one.get("tenant_id"), str)}


def _read_prefixes(counts: dict[str, Any]) -> PrefixFacts:
    try:
        return msgspec.convert(counts, PrefixFacts)
    except msgspec.ValidationError:
        return PrefixFacts()


def _describe_adapter(adapter: AdapterName, counted: Counted | None) -> AdapterFacts:
    number_to_digest = {version.number: version.digest for version in adapter.versions}
    numbers = [target.version for target in adapter.aliases[_LIVE]]
    return AdapterFacts(
        tenant_id=adapter.tenant_id,
        tenant=adapter.tenant,
        name=adapter.name,
        digests=tuple(number_to_digest[number] for number in numbers if number in number_to_digest),
        created_at=_read_time(adapter.adapter_id),
        called_at=None if counted is None else counted.last_at,
    )


def _read_time(row_id: str) -> datetime:
    """When a row was made: its id is a UUIDv7, which begins with the milliseconds of the epoch."""
    return datetime.fromtimestamp((uuid.UUID(row_id).int >> 80) / 1000, UTC)


def _list_limits(tenant: TenantEntry) -> dict[str, int]:
    return {} if tenant.rate_limits is None else msgspec.to_builtins(tenant.rate_limits)


def _object(state: dict[str, Any], name: str) -> dict[str, Any]:
    found = state.get(name)
    return found if isinstance(found, dict) else {}


def _number(state: dict[str, Any], name: str) -> int | None:
    found = state.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None
