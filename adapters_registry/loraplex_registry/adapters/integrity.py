"""What always holds between the registry's rows, whatever happened: called by tests after every act."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex_registry.adapters.view import read_targets
from loraplex_registry.db.model import AdapterRow, AliasHistoryRow, AliasRow, BaseRow, EpochRow, VersionRow


async def check_integrity(session: AsyncSession) -> None:
    """Assert every invariant over all rows; for tests and small databases."""
    epoch = (await session.execute(sa.select(EpochRow.epoch))).scalar_one()
    adapters = (await session.execute(sa.select(AdapterRow))).scalars().all()
    versions = (await session.execute(sa.select(VersionRow))).scalars().all()
    aliases = (await session.execute(sa.select(AliasRow))).scalars().all()
    history = (await session.execute(sa.select(AliasHistoryRow).order_by(AliasHistoryRow.revision))).scalars().all()
    changed = (await session.execute(sa.select(BaseRow.changed_epoch))).scalars().all()
    assert all(at <= epoch for at in [*changed, *(adapter.changed_epoch for adapter in adapters)])
    _check_names(adapters)
    for adapter in adapters:
        own = [version for version in versions if version.adapter_id == adapter.id]
        _check_adapter(adapter, own, [alias for alias in aliases if alias.adapter_id == adapter.id])
    for alias in aliases:
        _check_history(alias, [entry for entry in history if entry.alias_id == alias.id])


def _check_names(adapters: Sequence[AdapterRow]) -> None:
    living = [(adapter.tenant_id, adapter.name) for adapter in adapters if adapter.deleted_at is None]
    assert len(living) == len(set(living)), "a name means one adapter"
    defaults = [adapter.tenant_id for adapter in adapters if adapter.is_default]
    assert len(defaults) == len(set(defaults)), "a tenant has one default at most"


def _check_adapter(adapter: AdapterRow, versions: Sequence[VersionRow], aliases: Sequence[AliasRow]) -> None:
    numbers = sorted(version.number for version in versions)
    assert all(number < adapter.next_number for number in numbers), "a number is given once"
    state_of = {version.number: version.state for version in versions}
    for alias in aliases:
        targets = read_targets(alias.targets)
        states = {state_of[target.version] for target in targets}
        assert states <= {"ready", "quarantined"}, "targets are ready, or were until something was found"
        assert not targets or sum(target.weight for target in targets) == 100, "weights sum to 100"
    for version in versions:
        assert version.state != "quarantined" or version.quarantine is not None, "a quarantine has its reason"
        assert version.quarantine is None or version.state in ("quarantined", "retired"), "and no other state has one"
    if adapter.deleted_at is not None:
        assert not adapter.is_default, "a deleted adapter is no default"
        assert not any(alias.targets for alias in aliases), "a deleted adapter has no aliases"
        assert "ready" not in state_of.values(), "a deleted adapter has no ready version"


def _check_history(alias: AliasRow, entries: Sequence[AliasHistoryRow]) -> None:
    assert [entry.revision for entry in entries] == list(range(1, alias.revision + 1)), "no revision is missing"
    assert entries[-1].targets == alias.targets, "the last entry is what is there"
