"""The numbers to steer by, as a table: four of the engines, four of the requests, and what they are of."""

from __future__ import annotations

from loraplex.cli.output import print_table, stdout
from loraplex.wire.stats import EngineStats, Quantiles, Stats, StatsRow

_WINDOW_TO_WORDS = {"1m": "minute", "10m": "10 minutes", "1h": "hour"}
_TIMERS = (
    ("queue", "queue_s"),
    ("prefill", "prefill_s"),
    ("time to first token", "time_to_first_token_s"),
    ("between tokens", "inter_token_s"),
    ("whole request", "request_s"),
)
Row = tuple[str | None, ...]


def print_stats(stats: Stats) -> None:
    """Print a window; of one in which nothing happened the engines only."""
    total = stats.total
    rows = list_gauges(total)
    rows += [(name, None, *_show_times(getattr(total, field))) for name, field in _TIMERS] if total.requests else []
    window = f"The last {_WINDOW_TO_WORDS.get(stats.window, stats.window)}"
    if rows:
        print_table(f"\n{window}", ("number", "now", "p50", "p95", "p99"), rows, empty="")
    stdout().print(f"{'' if rows else f'{window}: '}{describe_requests(total)}", markup=False, soft_wrap=True)


def describe_requests(total: StatsRow) -> str:
    """Return in one line what was served."""
    if not total.requests:
        return "no requests"
    ends = [
        f"{count:,} {word}"
        for count, word in ((total.requests_error, "failed"), (total.requests_cancelled, "cancelled"))
        if count
    ]
    of_them = f" ({', '.join(ends)})" if ends else ""
    return (
        f"{total.requests:,} requests{of_them}, "
        f"{total.prompt_tokens:,} prompt and {total.completion_tokens:,} completion tokens"
    )


def list_gauges(total: StatsRow) -> list[Row]:
    """Return the rows of engines; those that a tenant may not see are left out."""
    engines = total.engines
    if engines is None:
        share = (total.cached_tokens, total.prompt_tokens)
        rows: list[Row] = []
        preemptions = total.preemptions
    else:
        share = (engines.prefix_hits, engines.prefix_queries)
        rows = _list_loads(engines)
        preemptions = engines.preemptions
    if engines is None and not total.requests:
        return rows
    return [
        *rows,
        ("preemptions, in all", f"{preemptions:,}", None, None, None),
        ("prompt found in prefix cache", _percent(share[0] / share[1]) if share[1] else None, None, None, None),
    ]


def _list_loads(engines: EngineStats) -> list[Row]:
    spread = engines.kv_usage
    return [
        ("KV cache used", _percent(engines.kv_usage_now), *map(_percent, (spread.p50, spread.p95, spread.p99))),
        ("requests waiting", f"{engines.waiting_now:,}", *_show_counts(engines.waiting)),
        ("requests running", f"{engines.running_now:,}", *_show_counts(engines.running)),
    ]


def _show_counts(spread: Quantiles) -> tuple[str, ...]:
    return tuple(f"{value:,.0f}" for value in (spread.p50, spread.p95, spread.p99))


def _show_times(spread: Quantiles) -> tuple[str | None, ...]:
    return tuple(show_seconds(value) if spread.count else None for value in (spread.p50, spread.p95, spread.p99))


def show_seconds(seconds: float) -> str:
    """Return a time with three digits that mean something."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
