"""What a tenant may store. Bytes and versions are judged before bytes are read and, exactly, when a row is written.

Everything that is not purged counts, retired versions and those of deleted adapters too: their bytes are still there.
Uploads in parts count with what they announced while they are open.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.db.model import AdapterRow, UploadRow, VersionRow
from loraplex_registry.errors import QuotaExceededError
from loraplex_registry.peft.report import Check, Report
from loraplex_registry.wire.identity import AdapterLimits


@dataclass(frozen=True)
class Use:
    """What is counted against a tenant's limits."""

    num_versions: int
    num_bytes: int
    open_bytes: int = 0
    """Of uploads in parts that are not complete yet."""


async def measure_use(session: AsyncSession, tenant_id: str) -> Use:
    """Return what versions of a tenant take."""
    query = (
        sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(VersionRow.size_bytes), 0))
        .join(AdapterRow, AdapterRow.id == VersionRow.adapter_id)
        .where(AdapterRow.tenant_id == tenant_id, VersionRow.state != "purged")
    )
    num_versions, num_bytes = (await session.execute(query)).one()
    return Use(num_versions, int(num_bytes))


async def check_announced(session: AsyncSession, tenant_id: str, limits: AdapterLimits, num_bytes: int) -> None:
    """Return if `num_bytes` more fit beside what is there and what other uploads have announced.

    Raises:
        QuotaExceededError: They do not.
    """
    if limits.adapter_bytes is None:
        return
    use = await measure_use(session, tenant_id)
    query = sa.select(sa.func.coalesce(sa.func.sum(UploadRow.size_bytes), 0)).where(
        UploadRow.tenant_id == tenant_id,
        UploadRow.state.in_(("open", "completing")),
        UploadRow.expires_at > datetime.now(UTC),
    )
    open_bytes = int((await session.execute(query)).scalar_one())
    _check_bytes(limits, Use(use.num_versions, use.num_bytes, open_bytes), num_bytes)


async def check_version(session: AsyncSession, tenant_id: str, limits: AdapterLimits, num_bytes: int) -> None:
    """Return if one more version of `num_bytes` fits; exact under the lock on names.

    Raises:
        QuotaExceededError: It does not.
    """
    if limits.adapter_bytes is None and limits.adapter_versions is None:
        return
    use = await measure_use(session, tenant_id)
    _check_bytes(limits, use, num_bytes)
    if limits.adapter_versions is not None and use.num_versions + 1 > limits.adapter_versions:
        raise QuotaExceededError(
            f"This tenant has {use.num_versions} versions and may have {limits.adapter_versions}, retired ones "
            "included until they are purged; ask an admin for a higher adapter_versions",
            param="adapter_versions",
        )


def _check_bytes(limits: AdapterLimits, use: Use, num_bytes: int) -> None:
    limit = limits.adapter_bytes
    if limit is None or use.num_bytes + use.open_bytes + num_bytes <= limit:
        return
    waiting = f", uploads in parts announced {use.open_bytes} more" if use.open_bytes else ""
    raise QuotaExceededError(
        f"This tenant stores {use.num_bytes} bytes{waiting} and may store {limit}: {num_bytes} more do not fit. "
        "Retired versions count until they are purged; ask an admin for a higher adapter_bytes",
        param="adapter_bytes",
    )


def judge_rank(report: Report, limits: AdapterLimits, rank: int) -> Report:
    """Return the report with the check `quota` on the adapter's rank, where the tenant has a limit of its own."""
    if limits.adapter_rank is None:
        return report
    if rank <= limits.adapter_rank:
        return report.with_check(Check("quota", "pass"))
    message = (
        f"The adapter has rank {rank}, and this tenant may use {limits.adapter_rank}; train with a lower rank, or ask "
        "an admin for a higher adapter_rank."
    )
    return report.with_check(Check("quota", "fail", message, "r"))
