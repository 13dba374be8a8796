"""Which limits a call has to keep, and what of it counts at its end. Knows orders, rows and settlements, no meters."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Literal

from loraplex.db.database import Database
from loraplex.gateway.debts import DebtRows
from loraplex.gateway.directory import Directory
from loraplex.gateway.dispatch import Order
from loraplex.gateway.problem import CODE_TO_STATUS
from loraplex.quotas.estimate import estimate_tokens
from loraplex.quotas.limiter import CountUsed, Limiter
from loraplex.quotas.quota import Charge, Subject, list_charges, list_quotas
from loraplex.usage.ledger import Ledger
from loraplex.usage.record import RequestRow, Settlement
from loraplex.usage.used import count_tokens_used
from loraplex_registry.wire.limits import RateLimits

_TOO_MANY = 429
_FIRST_OURS = 500
_COLUMNS: dict[str, Literal["tenant_id", "key_id", "adapter_id"]] = {
    "tenant": "tenant_id",
    "key": "key_id",
    "adapter": "adapter_id",
}


def find_charges(order: Order, directory: Directory, *, generates: bool) -> tuple[Charge, ...]:
    """Return what a call asks of the limits of its key, its adapter, and the tenant whose usage it is.

    Keys that replaced one another count together: a rotation gives nobody a second day.
    """
    key = directory.find_key_by_id(order.identity.key_id)
    adapter = order.resolved.adapter
    name = adapter.tenant if adapter else order.identity.tenant
    tenant = directory.find_tenant(name) if name else None
    limits: list[tuple[Subject, RateLimits | None]] = []
    if key is not None:
        limits.append(
            (Subject("key", directory.find_first_key(key.public_id), order.identity.tenant_id), key.rate_limits)
        )
    if adapter is not None:
        limits.append((Subject("adapter", adapter.adapter_id, adapter.tenant_id), adapter.limits))
    if tenant is not None:
        limits.append((Subject("tenant", str(tenant.id), str(tenant.id)), tenant.rate_limits))
    quotas = list_quotas(limits)
    if not quotas:
        return ()
    return list_charges(quotas, estimate_tokens(order.call.fields) if generates else 0)


def list_subjects(row: RequestRow, directory: Directory) -> list[Subject]:
    """Return whose usage a row is."""
    found = [Subject("key", directory.find_first_key(row.key_id))]
    if row.adapter_id is not None:
        found.append(Subject("adapter", row.adapter_id))
    if row.tenant_id is not None:
        found.append(Subject("tenant", row.tenant_id))
    return found


class RecountingLedger:
    """A ledger for requests that this gateway did not reserve: days and months are counted anew with them."""

    def __init__(self, ledger: Ledger, limiter: Limiter, directory: Directory) -> None:
        self._ledger = ledger
        self._limiter = limiter
        self._directory = directory

    async def settle(self, row: RequestRow, settlement: Settlement) -> None:
        """Commit how a request ended; see `Ledger.settle`."""
        await self._ledger.settle(row, settlement)
        await self._limiter.recount(list_subjects(row, self._directory))


def is_request(settlement: Settlement) -> bool:
    """Whether what ended so counts as a request: not if the platform failed, or had no room."""
    status = CODE_TO_STATUS.get(settlement.code or "", _FIRST_OURS)
    return settlement.outcome != "error" or (status < _FIRST_OURS and status != _TOO_MANY)


def build_limiter(
    database: Database, directory: Directory, report_degraded: Callable[[bool], None], gateway: str
) -> Limiter:
    """Return the limiter of a gateway, which asks the database what was used, and what is owed."""
    return Limiter(_count_by(database, directory), report_degraded, gateway, debts=DebtRows(database))


def _count_by(database: Database, directory: Directory) -> CountUsed:
    """Return what asks usage how much a subject has used."""

    async def count_used(subject: Subject, since: datetime) -> int:
        ids = directory.list_line(subject.id) if subject.scope == "key" else [subject.id]
        return await count_tokens_used(database, _COLUMNS[subject.scope], ids, since, subject.tenant_id)

    return count_used
