"""What `GET /api/v1/stats` tells of requests and engines. A field that another release does not send is as if empty."""

from __future__ import annotations

from datetime import datetime

import msgspec


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """How values are spread, in their own unit; all zero where there are none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """What engines said of themselves once a second, and by how much their counts grew.

    Of several engines together, `waiting`, `running` and slots are sums at each moment; `kv_usage` has every engine's
    values. `…_now` are the last ones, for `kv_usage` the highest of them.
    """

    replicas: int = 0
    kv_usage: Quantiles = Quantiles()
    waiting: Quantiles = Quantiles()
    running: Quantiles = Quantiles()
    kv_usage_now: float = 0.0
    waiting_now: int = 0
    running_now: int = 0
    slots: int = 0
    slots_used: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    loads: int = 0
    evictions: int = 0


class RequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that ended in a span of time, and the gaps between tokens that came in it.

    Times are of requests that came to a first token. `queue_s` and `prefill_s` are the engine's; the clock of
    `time_to_first_token_s` and `request_s` begins when the gateway has the request. Lengths are in tokens;
    `request_len` is prompt and completion together.
    """

    requests: int = 0
    requests_ok: int = 0
    requests_cancelled: int = 0
    requests_error: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    queue_s: Quantiles = Quantiles()
    prefill_s: Quantiles = Quantiles()
    time_to_first_token_s: Quantiles = Quantiles()
    inter_token_s: Quantiles = Quantiles()
    request_s: Quantiles = Quantiles()
    prompt_len: Quantiles = Quantiles()
    completion_len: Quantiles = Quantiles()
    request_len: Quantiles = Quantiles()


class StatsRow(RequestStats, frozen=True, kw_only=True):
    """One base, tenant, adapter or replica; keys that it is not of are None, and the adapter of calls of a base.

    `engines` is None where a row is of no engine as a whole, and where one tenant's requests are asked for.
    """

    base: str | None = None
    tenant: str | None = None
    adapter: str | None = None
    replica: str | None = None
    engines: EngineStats | None = None


class StatsPoint(RequestStats, frozen=True, kw_only=True):
    """All that was asked for in the seconds from `at` on."""

    at: datetime
    engines: EngineStats | None = None


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """One window, as far as the command line shows it."""

    window: str = ""
    total: StatsRow = StatsRow()
