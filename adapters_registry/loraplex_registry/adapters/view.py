"""What the management API shows of rows: pure builders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from loraplex_registry.db.model import AdapterRow, AliasHistoryRow, AliasRow, BaseRow, VersionRow
from loraplex_registry.peft.spec import BaseSpec, ModuleSpec
from loraplex_registry.wire.adapter import (
    AdapterView,
    AliasChangeView,
    AliasView,
    Quarantine,
    Report,
    Target,
    VersionView,
)

LIVE = "live"


class BaseView(msgspec.Struct, frozen=True, kw_only=True):
    """A base model; the fields of a `BaseSpec` and when it was registered."""

    name: str
    accepted_names: list[str]
    fingerprint: str
    weights_digest: str
    architecture: str
    vocab_size: int
    modules: dict[str, Any]
    max_lora_rank: int
    default_context: int
    max_saved_bytes: int
    matrix_hashes: dict[str, dict[str, str]]
    created_at: str


def show_time(at: datetime) -> str:
    """Return RFC 3339 in UTC."""
    return at.isoformat().replace("+00:00", "Z")


def read_targets(targets: Sequence[Any]) -> tuple[Target, ...]:
    """Return the targets that an alias's row holds."""
    return msgspec.convert(targets, tuple[Target, ...])


def read_quarantine(state: str, quarantine: Any) -> Quarantine | None:
    """Return why a version is quarantined; a retired one that was has it in its row, but is not."""
    return msgspec.convert(quarantine, Quarantine) if state == "quarantined" else None


def find_main_target(targets: Sequence[Target]) -> int | None:
    """Return the version with the most weight, the lowest of equals; None without targets."""
    return max(targets, key=lambda target: (target.weight, -target.version)).version if targets else None


def build_spec(base: BaseRow) -> BaseSpec:
    """Return what adapters of this base are judged against."""
    return BaseSpec(
        name=base.name,
        accepted_names=tuple(base.accepted_names),
        fingerprint=base.fingerprint,
        weights_digest=base.weights_digest,
        vocab_size=base.vocab_size,
        modules=msgspec.convert(base.modules, dict[str, ModuleSpec]),
        max_lora_rank=base.max_lora_rank,
        default_context=base.default_context,
        architecture=base.architecture,
        max_saved_bytes=base.max_saved_bytes,
        matrix_hashes=base.matrix_hashes,
    )


def show_base(base: BaseRow) -> BaseView:
    """Return the view of a base."""
    return BaseView(
        name=base.name,
        accepted_names=list(base.accepted_names),
        fingerprint=base.fingerprint,
        weights_digest=base.weights_digest,
        architecture=base.architecture,
        vocab_size=base.vocab_size,
        modules=base.modules,
        max_lora_rank=base.max_lora_rank,
        default_context=base.default_context,
        max_saved_bytes=base.max_saved_bytes,
        matrix_hashes=base.matrix_hashes,
        created_at=show_time(base.created_at),
    )


def show_adapter(adapter: AdapterRow, states: Mapping[int, str], aliases: Sequence[AliasRow]) -> AdapterView:
    """Return the view of an adapter with the states of its versions by number, and its aliases."""
    targets = {alias.name: list(read_targets(alias.targets)) for alias in aliases if alias.targets}
    live = find_main_target(targets.get(LIVE, []))
    latest = max(states, default=None)
    return AdapterView(
        tenant=adapter.tenant,
        name=adapter.name,
        base_model=adapter.base.name,
        is_default=adapter.is_default,
        live=live,
        live_state=None if live is None else states[live],
        latest=latest,
        latest_state=None if latest is None else states[latest],
        num_versions=len(states),
        aliases=targets,
        limits=adapter.limits or {},
        created_at=show_time(adapter.created_at),
        created_by=adapter.created_by,
    )


def show_version(version: VersionRow, live: Sequence[Target]) -> VersionView:
    """Return the view of a version, given what its adapter's alias `live` targets."""
    return VersionView(
        tenant=version.adapter.tenant,
        adapter=version.adapter.name,
        version=version.number,
        kind=version.kind,
        digest=version.digest,
        state=version.state,
        promoted=any(target.version == version.number for target in live),
        base_model=version.adapter.base.name,
        rank=version.rank,
        target_modules=tuple(version.target_modules),
        num_parameters=version.num_parameters,
        size_bytes=version.size_bytes,
        created_at=show_time(version.created_at),
        created_by=version.created_by,
        report=msgspec.convert(version.report, Report),
        quarantine=read_quarantine(version.state, version.quarantine),
        pool=version.pool,
    )


def show_alias(alias: AliasRow) -> AliasView:
    """Return the view of an alias."""
    return AliasView(
        alias=alias.name,
        targets=list(read_targets(alias.targets)),
        revision=alias.revision,
        updated_at=show_time(alias.updated_at),
    )


def show_alias_change(change: AliasHistoryRow) -> AliasChangeView:
    """Return the view of one revision of an alias."""
    return AliasChangeView(
        revision=change.revision,
        targets=list(read_targets(change.targets)),
        action=change.action,
        actor=change.actor,
        created_at=show_time(change.created_at),
    )
