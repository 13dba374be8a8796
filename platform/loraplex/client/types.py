"""The management API's objects as this client reads them. Fields that a server adds later are passed over."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from loraplex_registry.wire.adapter import Target


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A team; `bases` is None where it may use all of them."""

    name: str
    display_name: str | None = None
    state: str = "active"
    limits: dict[str, Any] | None = None
    bases: list[str] | None = None
    weight: int = 1
    created_at: str = ""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """An API key; `key` is there only in the answer that creates it, `rotated_from` the key that it replaces."""

    id: str
    name: str
    owner: str | None = None
    role: str = "tenant"
    scopes: list[str] = []
    limits: dict[str, int] = {}
    priority: int = 0
    created_at: str = ""
    expires_at: str | None = None
    revoked_at: str | None = None
    last_used_at: str | None = None
    rotated_from: str | None = None
    key: str | None = None


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A named adapter; `live` is the number of its live version, None where none is live, `live_state` its state."""

    tenant: str
    name: str
    base_model: str = ""
    is_default: bool = False
    live: int | None = None
    live_state: str | None = None
    latest: int | None = None
    latest_state: str | None = None
    num_versions: int = 0
    limits: dict[str, int] = {}
    created_at: str = ""


class Alias(msgspec.Struct, frozen=True, kw_only=True):
    """A movable name and the versions it points to."""

    alias: str
    targets: list[Target]
    revision: int
    updated_at: str = ""


class MovedAlias(NamedTuple):
    """An alias as it was just set; what it was before, as far as that was read, None if there was none of its name."""

    alias: Alias
    is_new: bool
    before: Alias | None = None

    @property
    def is_moved(self) -> bool:
        """Whether it led elsewhere before, so that there is a way back."""
        return not self.is_new and (self.before is None or self.before.targets != self.alias.targets)


class AliasChange(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of an alias's history."""

    revision: int
    targets: list[Target]
    created_at: str = ""
    actor: str = ""
    action: str = ""


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """A base model that the platform knows."""

    name: str
    accepted_names: list[str] = []
    fingerprint: str = ""
    weights_digest: str = ""
    max_lora_rank: int = 0
    default_context: int = 0


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine runs and how; sizes in tokens, `num_blocks` of `block_size` positions each."""

    dtype: str = ""
    device: str = ""
    max_model_len: int = 0
    max_loras: int = 0
    max_lora_rank: int = 0
    num_blocks: int = 0
    block_size: int = 0
    ops: str = ""
    row_invariant: bool | None = None


class FailedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A digest that an engine could not load; unless `is_final` it tries again."""

    reason: str = ""
    attempts: int = 0
    is_final: bool = False
    retry_in_s: float | None = None


class HarmfulAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A digest that an engine has quarantined for itself."""

    reason: str = ""
    strikes: int = 0


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine last said of itself; `model` is None while it starts. `failed` and `quarantined` are by digest."""

    model: EngineModel | None = None
    failed: dict[str, FailedLoad] = {}
    quarantined: dict[str, HarmfulAdapter] = {}


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as the gateway sees it, of a base or of one full `model`; `problem` says why it gets no traffic."""

    replica: str
    url: str
    pool: str = ""
    base: str | None = None
    model: str | None = None
    serves: bool
    problem: str | None = None
    state: EngineState = EngineState()


class FleetDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Something about the fleet that is not as it should be, and who ends it: `platform` or `operator`."""

    kind: str
    subject: str
    desired: str = ""
    actual: str = ""
    since: str = ""
    is_repaired_by: str = ""
    attempts: int = 0
    problem: str | None = None


class Finding(msgspec.Struct, frozen=True):
    """What a rule of `loraplex advise` found out about one subject."""

    rule: str
    subject: str
    state: str
    message: str
    effect: str = ""
    flag: str = ""
    evidence: dict[str, Any] = {}


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """The engines, and where they are not as they should be."""

    data: list[Replica] = []
    differences: list[FleetDifference] = []


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A name that this key may call."""

    id: str
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None


class WarmReplica(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that was asked to load a version; `problem` says why it could not."""

    replica: str
    state: str = ""
    problem: str | None = None


class Warmth(msgspec.Struct, frozen=True, kw_only=True):
    """Every engine that was asked."""

    replicas: list[WarmReplica]


class Outcomes(msgspec.Struct, frozen=True, kw_only=True):
    """How the generations of one version ended in one minute."""

    minute: str
    version: int
    requests: int = 0
    ok: int = 0
    cancelled: int = 0
    error: int = 0
    lost: int = 0


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One act: what was done, to what, by whom and in which request."""

    id: str
    at: str
    action: str
    tenant: str | None = None
    subject: str | None = None
    actor: str | None = None
    key_id: str | None = None
    request_id: str | None = None
    details: dict[str, Any] | None = None


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, tokens and bytes, counted by somebody."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    load_bytes: int = 0


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """One request that an engine and the usage rows see differently; None: one of them does not know it."""

    request_id: str
    engine: Counted | None = None
    usage: Counted | None = None


class ReplicaReconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """One engine against its usage rows; `problem` says why it could not be asked."""

    replica: str
    is_exact: bool
    problem: str | None = None
    began_at: str = ""
    engine: Counted = Counted()
    usage: Counted = Counted()
    pending: Counted = Counted()
    difference: Counted = Counted()
    lost: int = 0
    mismatches: list[Mismatch] = []


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """All engines against the usage rows."""

    data: list[ReplicaReconciliation]
    is_exact: bool
