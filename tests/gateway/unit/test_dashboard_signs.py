"""What the overview says is wrong: each sign with a case that shows it, and one that does not."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from loraplex.dashboard.sign import (
    Calls,
    Thrash,
    find_down,
    find_failing,
    find_overdue,
    find_queue,
    find_refused,
    list_thrash,
)
from loraplex.stats.report import StatsReport
from loraplex.wire.stats import EngineStats, Quantiles, StatsRow
from loraplex_registry.wire.adapter import AdapterName, Target, VersionName

NOW = datetime(2026, 12, 1, tzinfo=UTC)


def build_report(tokens: Sequence[int], waiting: float = 5.0, kv: float = 0.5, preemptions: int = 0) -> StatsReport:
    """A window in which tenants a, b and so on took so many tokens."""
    rows = [
        StatsRow(tenant=chr(ord("a") + index), requests=10, prompt_tokens=count, completion_tokens=0)
        for index, count in enumerate(tokens)
    ]
    engines = EngineStats(
        replicas=1,
        waiting=Quantiles(count=600, p95=waiting, max=waiting),
        waiting_now=int(waiting),
        kv_usage=Quantiles(count=600, p50=kv),
        preemptions=preemptions,
    )
    total = StatsRow(
        requests=10 * len(rows),
        prompt_tokens=sum(tokens),
        queue_s=Quantiles(count=10, p95=2.5),
        engines=engines,
    )
    return StatsReport(start=NOW, stop=NOW, by="tenant", rows=rows, total=total, step_s=10, series=[])


def build_adapter(targets: dict[int, int], states: dict[int, str] | None = None) -> AdapterName:
    versions = [
        VersionName(number=number, digest=f"sha256:{number:064}", state=state, base="tiny", kind="lora", rank=8)
        for number, state in ({1: "ready", 2: "ready"} | (states or {})).items()
    ]
    return AdapterName(
        adapter_id="a1",
        tenant_id="t1",
        tenant="team-x",
        name="support",
        base="tiny",
        is_default=True,
        deleted=False,
        versions=tuple(versions),
        aliases={"live": tuple(Target(number, weight) for number, weight in sorted(targets.items()))},
        alias_ids={},
    )


def titles(found: Any) -> list[str]:
    return [sign.title for sign in found]


class TestRules:
    """The rules alone."""

    @pytest.mark.parametrize(
        ("tokens", "waiting", "expected"),
        [
            ([9_000, 500, 500], 5.0, ["a floods the engines"]),
            ([9_000, 500, 500], 0.0, []),
            ([400, 300, 300], 5.0, ["Requests wait for engines"]),
            ([9_000, 8_000, 500], 5.0, ["Requests wait for engines"]),
            ([9_000], 5.0, ["Requests wait for engines"]),
        ],
    )
    def test_who_floods_takes_most_while_others_wait(
        self, tokens: Sequence[int], waiting: float, expected: list[str]
    ) -> None:
        assert titles(find_queue(build_report(tokens, waiting), "10m")) == expected

    def test_a_flood_is_told_with_its_figures_and_leads_to_the_limits(self) -> None:
        (sign,) = find_queue(build_report([9_000, 500, 500]), "10m")
        assert "33.3 % of all requests, 90.0 % of the tokens" in sign.text
        assert "up to 5 requests waited" in sign.text
        assert sign.link == "/ui/limits/a"

    def test_a_cache_is_full_only_if_requests_lose_their_blocks(self) -> None:
        assert titles(find_queue(build_report([1, 1], 0.0, 0.99, 7), "1h")) == ["The KV cache is full"]
        assert titles(find_queue(build_report([1, 1], 0.0, 0.99, 0), "1h")) == []
        assert titles(find_queue(build_report([1, 1], 0.0, 0.5, 7), "1h")) == []

    @pytest.mark.parametrize(
        ("targets", "calls", "expected"),
        [
            ({1: 90, 2: 10}, {1: (900, 9), 2: (100, 60)}, ["The canary of team-x/support fails"]),
            ({1: 90, 2: 10}, {1: (900, 9), 2: (19, 19)}, []),
            ({1: 90, 2: 10}, {1: (900, 9), 2: (100, 5)}, []),
            ({1: 90, 2: 10}, {1: (900, 450), 2: (100, 60)}, []),
            ({1: 90, 2: 10}, {1: (900, 450), 2: (100, 2)}, ["team-x/support fails"]),
            ({2: 100}, {1: (900, 900), 2: (100, 60)}, ["team-x/support fails"]),
            ({2: 100}, {1: (900, 900)}, []),
            ({}, {1: (900, 900)}, []),
        ],
    )
    def test_a_version_fails_if_it_is_live_and_worse_than_the_main_one(
        self, targets: dict[int, int], calls: dict[int, tuple[int, int]], expected: list[str]
    ) -> None:
        counted = {("a1", number): Calls(*found) for number, found in calls.items()}
        assert titles(find_failing([build_adapter(targets)], counted)) == expected

    def test_many_that_fail_are_counted(self) -> None:
        adapters = [build_adapter({1: 100})] * 5
        found = titles(find_failing(adapters, {("a1", 1): Calls(100, 50)}))
        assert found == ["team-x/support fails"] * 3 + ["2 more adapters fail calls"]

    def test_what_is_refused_is_what_live_leads_to(self) -> None:
        refused = build_adapter({1: 10, 2: 90}, {2: "quarantined"})
        beside = build_adapter({1: 90, 2: 10}, {2: "quarantined"})
        assert titles(find_refused([refused])) == ["1 adapter is refused"]
        (newest,) = find_refused([beside])
        assert newest.title == "A newest version is quarantined"
        assert "team-x/support@2" in newest.text
        assert titles(find_refused([build_adapter({}, {2: "quarantined"})])) == ["A newest version is quarantined"]
        assert titles(find_refused([build_adapter({2: 100}, {1: "quarantined"})])) == []

    def test_what_else_there_is_is_named(self) -> None:
        (thrash,) = list_thrash([Thrash("main-0", "9 adapters are wanted", [("a/b", 12), ("c/d", 2)])])
        assert thrash.text == "9 adapters are wanted. Loaded most in ten minutes: a/b (12 times), c/d (2 times)."
        assert titles(find_down([("one", None), ("two", "it is away")], 0)) == ["1 of 2 replicas get no traffic"]
        assert titles(find_down([("one", None)], 2)) == ["The fleet is not as it should be"]
        assert titles(find_down([("one", None)], 0)) == []
        assert titles(find_down([], 0)) == ["There is no engine"]
        (overdue,) = find_overdue(["a/b"] * 5)
        assert overdue.text == "a/b, a/b, a/b and 2 more: extend or revert."
        assert titles(find_overdue([])) == []
