"""Signs that something is wrong, each with its cause by name and the page that shows more of it. Pure.

The bounds are those of the alert rules in helm/observability, where both know the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal
from urllib.parse import quote

import msgspec

from loraplex.dashboard.shown import show_count, show_percent, show_seconds, show_times
from loraplex.stats.report import StatsReport
from loraplex.wire.stats import EngineStats, StatsRow
from loraplex_registry.wire.adapter import AdapterName, Target

_LIVE = "live"
_MIN_WAITING = 1.0
_FLOOD_SHARE, _FLOOD_TO_NEXT = 0.3, 3.0
_FULL = 0.95
_MIN_CALLS, _FAILING, _WORSE = 20, 0.05, 2.0
_MAX_NAMED, _WHOLE = 3, 100


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to look at: `bad` hurts callers now, `warn` may soon. `link` is the page, `action` what to do there."""

    tone: Literal["bad", "warn"]
    title: str
    text: str
    link: str
    action: str


class Calls(msgspec.Struct, frozen=True):
    """Calls of one version in the last hour."""

    requests: int
    failed: int

    @property
    def ratio(self) -> float:
        """The part that failed."""
        return self.failed / self.requests if self.requests else 0.0


class Failing(msgspec.Struct, frozen=True):
    """A version that fails: its adapter's name, its part of `live`, its calls, and the same of the main version."""

    name: str
    target: Target
    calls: Calls
    main: Target
    main_calls: Calls


class Thrash(msgspec.Struct, frozen=True):
    """One engine whose adapters push each other out: why that is known, and those that were loaded most."""

    replica: str
    reason: str
    loaded: Sequence[tuple[str, int]]


def find_queue(report: StatsReport, window: str) -> Iterator[Sign]:
    """Say that requests wait, and for whom, and that caches are full. `report` is by tenant."""
    engines = report.total.engines
    if engines is None:
        return
    if engines.waiting.p95 >= _MIN_WAITING:
        yield _describe_queue(engines, report, window)
    if engines.kv_usage.p50 >= _FULL and engines.preemptions:
        yield Sign(
            tone="bad",
            title="The KV cache is full",
            text=(
                f"Half of the time it was used to {show_percent(engines.kv_usage.p50)} or more, and "
                f"{show_count(engines.preemptions)} running requests lost their blocks and computed them again."
            ),
            link="/ui/advice",
            action="Advice",
        )


def list_thrash(thrashing: Sequence[Thrash]) -> Iterator[Sign]:
    """Say where adapters push each other out, and which."""
    for one in thrashing:
        names = ", ".join(f"{name} ({show_times(count)})" for name, count in one.loaded[:_MAX_NAMED])
        loaded = f" Loaded most in ten minutes: {names}." if names else ""
        yield Sign(
            tone="warn",
            title=f"Adapters push each other out of the slots of {one.replica}",
            text=f"{one.reason[:1].upper()}{one.reason[1:]}.{loaded}",
            link="/ui/slots",
            action="Slots",
        )


def find_failing(adapters: Sequence[AdapterName], calls: Mapping[tuple[str, int], Calls]) -> Iterator[Sign]:
    """Say which versions that are live fail, those that fail most calls first; `calls` by adapter id and version."""
    found = [failing for adapter in adapters if (failing := find_worst(adapter, calls)) is not None]
    found.sort(key=lambda one: -one.calls.failed)
    yield from map(describe_failing, found[:_MAX_NAMED])
    if len(found) > _MAX_NAMED:
        yield Sign(
            tone="bad",
            title=f"{len(found) - _MAX_NAMED} more adapters fail calls",
            text="Those that fail most are named above; the list has the failed calls of each.",
            link="/ui/adapters",
            action="Adapters",
        )


def find_worst(adapter: AdapterName, calls: Mapping[tuple[str, int], Calls]) -> Failing | None:
    """Return the version behind `live` that fails many calls, None if none does: a canary more than the main one."""
    targets = adapter.aliases.get(_LIVE, ())
    if not targets:
        return None

    def of(target: Target) -> Calls:
        return calls.get((adapter.adapter_id, target.version), Calls(0, 0))

    main = max(targets, key=lambda one: (one.weight, -one.version))
    worst = max(targets, key=lambda one: of(one).ratio)
    is_bad = of(worst).requests >= _MIN_CALLS and of(worst).ratio > _FAILING
    if not is_bad or (worst != main and of(worst).ratio <= _WORSE * of(main).ratio):
        return None
    return Failing(f"{adapter.tenant}/{adapter.name}", worst, of(worst), main, of(main))


def describe_failing(failing: Failing) -> Sign:
    """Return what to say of a version that fails."""
    name, calls, is_canary = failing.name, failing.calls, failing.target != failing.main
    share = f"has {failing.target.weight} % of live" if failing.target.weight < _WHOLE else "is live"
    text = (
        f"Version {failing.target.version}, which {share}, failed {show_count(calls.failed)} of "
        f"{show_count(calls.requests)} calls ({show_percent(calls.ratio)}) in the last hour"
    )
    main = failing.main.version
    advice = (
        f"; version {main} failed {show_percent(failing.main_calls.ratio)}. Give live to version {main} alone."
        if is_canary
        else ". Roll back, if an earlier version did better."
    )
    return Sign(
        tone="bad",
        title=f"The canary of {name} fails" if is_canary else f"{name} fails",
        text=text + advice,
        link=f"/ui/adapters/{name}",
        action="Adapter",
    )


def find_refused(adapters: Sequence[AdapterName]) -> Iterator[Sign]:
    """Say which adapters are refused, as what `live` leads to is quarantined, and whose newest version alone is."""
    refused = [f"{adapter.tenant}/{adapter.name}" for adapter in adapters if _is_refused(adapter)]
    if refused:
        yield Sign(
            tone="bad",
            title="1 adapter is refused" if len(refused) == 1 else f"{len(refused)} adapters are refused",
            text=f"What their name leads to is quarantined: {_list(refused)}.",
            link="/ui/adapters?state=quarantined",
            action="Adapters",
        )
    newest = [found for adapter in adapters if not _is_refused(adapter) and (found := _find_newest_refused(adapter))]
    if newest:
        yield Sign(
            tone="warn",
            title="A newest version is quarantined" if len(newest) == 1 else "Newest versions are quarantined",
            text=f"Calls of {_list(newest)} are refused; the version's page says why.",
            link="/ui/adapters?state=quarantined",
            action="Adapters",
        )


def find_down(replicas: Sequence[tuple[str, str | None]], num_differences: int) -> Iterator[Sign]:
    """Say which replicas, of name and problem, get no traffic, and that somebody has to repair what differs."""
    if not replicas:
        yield Sign(
            tone="bad",
            title="There is no engine",
            text="Calls are refused with no_replica until LORAPLEX_POOLS names one that serves.",
            link="#fleet-title",
            action="Fleet",
        )
    down = [(name, problem) for name, problem in replicas if problem is not None]
    if down:
        told = "; ".join(f"{name}: {problem}" for name, problem in down[:_MAX_NAMED])
        yield Sign(
            tone="bad",
            title=f"{len(down)} of {len(replicas)} replicas get no traffic",
            text=f"{told}.",
            link="#fleet-title",
            action="Fleet",
        )
    if num_differences:
        yield Sign(
            tone="warn",
            title="The fleet is not as it should be",
            text=f"{num_differences} differences are left to an operator.",
            link="#differences-title",
            action="Differences",
        )


def find_overdue(names: Sequence[str]) -> Iterator[Sign]:
    """Say which escalations are past their review."""
    if names:
        yield Sign(
            tone="warn",
            title="Full fine-tunes are past their review",
            text=f"{_list(names)}: extend or revert.",
            link="/ui/escalations?state=overdue",
            action="Escalations",
        )


def _describe_queue(engines: EngineStats, report: StatsReport, window: str) -> Sign:
    queue_s = report.total.queue_s.p95 if report.total.queue_s.count else None
    wait = (
        f"up to {show_count(engines.waiting.max)} requests waited at a time, {show_count(engines.waiting_now)} do now; "
        f"one in twenty for {show_seconds(queue_s)} or longer"
    )
    flood = _find_flood(report.rows)
    if flood is None:
        return Sign(
            tone="warn",
            title="Requests wait for engines",
            text=f"{wait[:1].upper()}{wait[1:]}. No tenant stands out: the load is more than the engines can take.",
            link=f"/ui/traffic?window={window}",
            action="Traffic",
        )
    total = report.total
    return Sign(
        tone="bad",
        title=f"{flood.tenant} floods the engines",
        text=(
            f"It sent {show_percent(flood.requests / total.requests)} of all requests, "
            f"{show_percent(_work(flood) / _work(total))} of the tokens, while {wait}. A limit on its tokens a minute "
            "would hold it back."
        ),
        link=f"/ui/limits/{quote(flood.tenant or '', safe='')}",
        action="Its limits",
    )


def _find_flood(rows: Sequence[StatsRow]) -> StatsRow | None:
    """The tenant whose requests take most, if that is much of all, and many times what the next one's take."""
    ordered = sorted((row for row in rows if row.tenant), key=_work, reverse=True)
    if len(ordered) < 2:
        return None
    first, second = ordered[:2]
    is_much = _work(first) >= _FLOOD_SHARE * sum(map(_work, rows))
    return first if is_much and _work(first) >= _FLOOD_TO_NEXT * _work(second) else None


def _work(row: StatsRow) -> int:
    """Tokens that engines computed, 1 at least."""
    return max(1, row.prompt_tokens - row.cached_tokens + row.completion_tokens)


def _is_refused(adapter: AdapterName) -> bool:
    number_to_state = {version.number: version.state for version in adapter.versions}
    main = max(adapter.aliases.get(_LIVE, ()), key=lambda one: (one.weight, -one.version), default=None)
    return main is not None and number_to_state.get(main.version) == "quarantined"


def _find_newest_refused(adapter: AdapterName) -> str | None:
    newest = max(adapter.versions, key=lambda version: version.number, default=None)
    is_refused = newest is not None and newest.state == "quarantined"
    return f"{adapter.tenant}/{adapter.name}@{newest.number}" if newest is not None and is_refused else None


def _list(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
