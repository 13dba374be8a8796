"""What rules look at, as plain data: calls that ended, engines, adapters, tenants. Whoever asks gathers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec


class Call(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One settled request. `began_s` is in seconds of the epoch, `replica` an engine's URL."""

    base: str
    tenant_id: str | None = None
    digest: str | None = None
    replica: str = ""
    outcome: str = "ok"
    began_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    load_bytes: int = 0
    prefill_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Its length: prompt and answer."""
        return self.prompt_tokens + self.completion_tokens


class PrefixFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How many prompt tokens of so many requests repeat a prefix, as an engine counted since it started.

    `forgotten_blocks` above 0: some that repeat were taken for new.
    """

    requests: int = 0
    prompt_tokens: int = 0
    repeated_tokens: int = 0
    forgotten_blocks: int = 0


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its flags, and its counts since it started. None: it does not say.

    `preempted_at` is with how many running requests preemptions begin; `tenant_prefixes` are by tenant id.
    """

    name: str
    url: str
    base: str
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_loras: int | None = None
    kv_tokens: int | None = None
    kv_bytes: int | None = None
    preemptions: int = 0
    preempted_at: int | None = None
    is_caching: bool | None = None
    prefixes: PrefixFacts = PrefixFacts()
    tenant_prefixes: Mapping[str, PrefixFacts] = {}


class AdapterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that can be called: what its live alias leads to, when it was made and when it was called last.

    `called_at` None: not within the days that are remembered.
    """

    tenant_id: str
    tenant: str
    name: str
    digests: tuple[str, ...]
    created_at: datetime
    called_at: datetime | None = None

    @property
    def model(self) -> str:
        """What it is called by."""
        return f"{self.tenant}/{self.name}"


class TenantFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant with limits on calls: the limits, and tokens of the day and the month of UTC."""

    tenant_id: str
    name: str
    limits: Mapping[str, int]
    tokens_today: int = 0
    tokens_this_month: int = 0


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known at `now`.

    `calls` are the latest ones, oldest first, of `days` at most; `num_calls` are all of these adapters that were
    counted in `remembered_days`. `tenant_id` is the tenant who asks, None for the platform.
    """

    now: datetime
    calls: Sequence[Call] = ()
    days: int = 7
    num_calls: int = 0
    remembered_days: int = 30
    engines: Sequence[EngineFacts] = ()
    adapters: Sequence[AdapterFacts] = ()
    tenants: Sequence[TenantFacts] = ()
    tenant_id: str | None = None
