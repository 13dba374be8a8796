"""The management API's objects as this client reads them. Fields that a server adds later are passed over."""

from __future__ import annotations

from typing import Any

import msgspec

from loraplex_registry.wire.adapter import Target


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A team; `bases` is None where it may use all of them."""

    name: str
    display_name: str | None = None
    state: str = "active"
    limits: dict[str, Any] | None = None
    bases: list[str] | None = None
    created_at: str = ""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """An API key; `key` is there only in the answer that creates it."""

    id: str
    name: str
    owner: str | None = None
    role: str = "tenant"
    scopes: list[str] = []
    created_at: str = ""
    expires_at: str | None = None
    revoked_at: str | None = None
    last_used_at: str | None = None
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
    num_versions: int = 0
    created_at: str = ""


class Alias(msgspec.Struct, frozen=True, kw_only=True):
    """A movable name and the versions it points to."""

    alias: str
    targets: list[Target]
    revision: int
    updated_at: str = ""


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
    """One engine as the gateway sees it; `problem` says why it gets no traffic."""

    replica: str
    url: str
    pool: str = ""
    base: str | None = None
    serves: bool
    problem: str | None = None
    state: EngineState = EngineState()


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A name that this key may call."""

    id: str
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
