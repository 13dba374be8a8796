"""What `GET /api/v1/stats` answers, as far as the command line shows it."""

from __future__ import annotations

import msgspec


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """How values are spread."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """What engines said of themselves in the window."""

    kv_usage: Quantiles = Quantiles()
    waiting: Quantiles = Quantiles()
    running: Quantiles = Quantiles()
    kv_usage_now: float = 0.0
    waiting_now: int = 0
    running_now: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class StatsTotal(msgspec.Struct, frozen=True, kw_only=True):
    """All requests of the window, and the engines where this key may know of them."""

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
    engines: EngineStats | None = None


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """One window."""

    window: str = ""
    total: StatsTotal = StatsTotal()
