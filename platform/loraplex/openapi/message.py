"""The bodies of the gateway's own routes as types: those that handlers read, and those that they answer as dicts."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loraplex.gateway.routes.keys import KeyCreate, KeyPatch, KeyRotate
from loraplex.gateway.routes.tenants import TenantCreate, TenantPatch
from loraplex_engine.wire.openai import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    TokenizeResponse,
    Usage,
)
from loraplex_registry.wire.limits import RateLimits

Scope = Literal[
    "infer",
    "adapters:read",
    "adapters:write",
    "usage:read",
    "keys:write",
    "escalations:write",
    "metrics:read",
    "audit:read",
]


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    """What a tenant may store and call; null is no limit."""

    adapter_bytes: int | None = None
    adapter_versions: int | None = None
    adapter_rank: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None


class Tenant(msgspec.Struct):
    """A tenant."""

    name: str
    display_name: str | None
    state: Literal["active", "suspended"]
    bases: list[str] | None
    limits: dict[str, int]
    weight: int
    created_at: str


class Key(msgspec.Struct):
    """A key, without its secret."""

    id: str
    name: str
    owner: str
    role: Literal["tenant", "admin", "admin_readonly"]
    scopes: list[Scope]
    limits: dict[str, int]
    priority: int
    created_at: str
    created_by: str
    expires_at: str | None
    revoked_at: str | None
    last_used_at: str | None
    rotated_from: str | None


class NewKey(Key):
    """A key as the answer that creates it shows it: with its secret in `key`."""

    key: str


class Event(msgspec.Struct):
    """One act."""

    id: str
    at: str
    action: str
    tenant: str | None
    subject: str
    actor: str
    key_id: str
    request_id: str
    details: dict[str, Any]


class OutcomeRow(msgspec.Struct):
    """How the generations of one version ended that were settled in one minute."""

    minute: str
    version: int
    requests: int
    ok: int
    cancelled: int
    error: int
    lost: int


class WarmedEngine(msgspec.Struct):
    """An engine that holds the version now, or why it does not."""

    replica: str
    state: Literal["resident"]
    problem: str


class Warmed(msgspec.Struct):
    """Every engine of the version's base."""

    replicas: list[WarmedEngine]


class Engine(msgspec.Struct):
    """One engine of the fleet, of a base or of one full model; `state` is what it last said of itself.

    `trusted` is false while the gateway sends it nothing for what its last answers were.
    """

    replica: str
    url: str
    pool: str
    base: str | None
    model: str | None
    serves: bool
    problem: str | None
    trusted: bool
    pinned: list[str]
    state: dict[str, Any]


class PinnedVersion(msgspec.Struct):
    """A version that a pin means now."""

    model: str
    digest: str


class PoolPin(msgspec.Struct):
    """A name that is always loaded, and the engines that are to hold it; `copies` is null for all of the pool."""

    model: str
    copies: int | None
    problem: str | None
    versions: list[PinnedVersion]
    replicas: list[str]


class DesiredPool(msgspec.Struct):
    """What the operator wants of a pool."""

    pool: str
    base: str | None
    model: str | None
    engines: list[str]
    pins: list[PoolPin]


class FleetDifference(msgspec.Struct):
    """Something that is not as it should be; `problem` says why the last repair failed."""

    kind: str
    subject: str
    digest: str | None
    desired: str
    actual: str
    since: str
    is_repaired_by: Literal["platform", "operator"]
    attempts: int
    problem: str | None


class FleetRepair(msgspec.Struct):
    """A repair that was made, and for how many seconds the difference had been there."""

    at: str
    kind: str
    subject: str
    digest: str | None
    action: str
    took_s: float


class FleetReport(msgspec.Struct):
    """The engines, what is wanted of them, where that differs, and what was repaired lately."""

    data: list[Engine]
    next_cursor: None
    desired: list[DesiredPool]
    differences: list[FleetDifference]
    repairs: list[FleetRepair]


class Alive(msgspec.Struct):
    """The process lives."""

    status: Literal["alive"]


class Readiness(msgspec.Struct):
    """Whether the gateway serves, and why not."""

    status: Literal["ready", "not ready"]
    problem: str | None


class Model(msgspec.Struct):
    """What a key may call."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None


class Models(msgspec.Struct):
    """All that a key may call."""

    object: Literal["list"]
    data: list[Model]


class CompletionChoice(msgspec.Struct):
    """One answer."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: dict[str, Any] | None
    prompt_logprobs: Any


class Completion(msgspec.Struct):
    """A completion."""

    id: str
    system_fingerprint: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatAnswerMessage(msgspec.Struct):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[dict[str, Any]]


class ChatAnswerChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatAnswerMessage
    finish_reason: str
    logprobs: dict[str, Any] | None


class ChatCompletion(msgspec.Struct):
    """A chat's answer."""

    id: str
    system_fingerprint: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatAnswerChoice]
    usage: Usage
    prompt_logprobs: Any


GATEWAY_MESSAGES: tuple[type[msgspec.Struct], ...] = (
    Alive,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Event,
    FleetReport,
    Key,
    KeyCreate,
    KeyPatch,
    KeyRotate,
    Limits,
    Models,
    NewKey,
    OutcomeRow,
    RateLimits,
    Readiness,
    Tenant,
    TenantCreate,
    TenantPatch,
    TokenizeRequest,
    TokenizeResponse,
    Warmed,
)
