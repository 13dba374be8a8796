"""Messages about adapters: what the API shows, what artifacts say of themselves, what gateways learn of names."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loraplex_registry.peft.parity import ParityResult
from loraplex_registry.peft.report import Check, Report
from loraplex_registry.wire.limits import RateLimits

__all__ = [
    "AdapterName",
    "AdapterView",
    "AliasChangeView",
    "AliasView",
    "BaseName",
    "Check",
    "Manifest",
    "ManifestFile",
    "NamesDelta",
    "ParityResult",
    "Quarantine",
    "QuarantineReason",
    "Report",
    "Target",
    "VersionName",
    "VersionView",
]


QuarantineReason = Literal["load_failed", "parity", "by_admin"]


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """Why a version is not served, and since when (RFC 3339 in UTC).

    `reason` is `load_failed` (its bytes cannot be loaded, on every engine that tried), `parity` (an engine answers
    otherwise than the files say) or `by_admin`; `message` is one sentence on the cause.
    """

    reason: QuarantineReason
    message: str
    since: str


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    """A version as the management API shows it; `created_at` is RFC 3339 in UTC, `quarantine` None unless it is.

    `pool` names the replicas that serve a version of kind `full`, None for a LoRA.
    """

    tenant: str
    adapter: str
    version: int
    kind: str
    digest: str
    state: str
    promoted: bool
    base_model: str
    rank: int
    target_modules: tuple[str, ...]
    num_parameters: int
    size_bytes: int
    created_at: str
    created_by: str
    report: Report
    quarantine: Quarantine | None = None
    pool: str | None = None


class ManifestFile(msgspec.Struct, frozen=True):
    """One file of an artifact: its name, its size in bytes and the sha256 of its bytes in hex."""

    name: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json` of an artifact, written last: the artifact exists once it is there.

    `dropped` names tensors that were uploaded and are not stored, since they are copies of the base's.
    """

    digest: str
    base_fingerprint: str
    files: tuple[ManifestFile, ...]
    config: dict[str, Any]
    dropped: tuple[str, ...] = ()


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version number and its weight in percent."""

    version: int
    weight: int


class AdapterView(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter; `live` is the version with the most weight at the alias `live`, `latest` the newest number.

    `limits` are those on calls of it. `live_state` is the state of the version `live`; any but `ready` means that the
    adapter's name is not answered. `latest_state` is that of the version `latest`.
    """

    tenant: str
    name: str
    base_model: str
    is_default: bool
    live: int | None
    live_state: str | None
    latest: int | None
    num_versions: int
    aliases: dict[str, list[Target]]
    limits: dict[str, int]
    created_at: str
    created_by: str
    latest_state: str | None = None


class AliasView(msgspec.Struct, frozen=True, kw_only=True):
    """An alias, its targets in order of version number, and its revision, which is its ETag."""

    alias: str
    targets: list[Target]
    revision: int
    updated_at: str


class AliasChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """One revision of an alias; no targets means that it was deleted."""

    revision: int
    targets: list[Target]
    action: str
    actor: str
    created_at: str


class VersionName(msgspec.Struct, frozen=True):
    """What resolution needs to know of one version; `pool` serves it if it is a full fine-tune.

    `weights_digest` names the base's weights that the parity gate found it right with, None if it never looked: no
    others may serve it.
    """

    number: int
    digest: str
    state: str
    base: str
    kind: str
    rank: int
    quarantine: Quarantine | None = None
    pool: str | None = None
    weights_digest: str | None = None


class AdapterName(msgspec.Struct, frozen=True, kw_only=True):
    """Everything resolution needs to know of one adapter; it replaces what was known of `adapter_id`.

    `aliases` maps an alias to its targets in order of version number, `alias_ids` to the id that canary buckets hash.
    `limits` hold for all calls of it together, whoever makes them.
    """

    adapter_id: str
    tenant_id: str
    tenant: str
    name: str
    base: str
    is_default: bool
    deleted: bool
    versions: tuple[VersionName, ...]
    aliases: dict[str, tuple[Target, ...]]
    alias_ids: dict[str, str]
    limits: RateLimits | None = None


class BaseName(msgspec.Struct, frozen=True, kw_only=True):
    """A base model as gateways know it."""

    name: str
    accepted_names: tuple[str, ...]
    fingerprint: str
    weights_digest: str
    max_lora_rank: int
    default_context: int


class NamesDelta(msgspec.Struct, frozen=True, kw_only=True):
    """All adapters and bases that changed after the epoch asked for, and the epoch they lead to."""

    epoch: int
    adapters: tuple[AdapterName, ...]
    bases: tuple[BaseName, ...]
