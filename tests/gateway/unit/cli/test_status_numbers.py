"""`loraplex status` shows the numbers to steer by, those that its key may see."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
import pytest

from loraplex.cli.app import main
from loraplex.cli.stats_table import describe_requests, list_gauges, show_seconds
from loraplex.client.connection import Connection
from loraplex.wire.stats import EngineStats, Quantiles, StatsRow

TIMES = {"count": 812, "mean": 0.02, "p50": 0.0041, "p95": 0.0904, "p99": 1.25, "max": 2.0}
TOTAL: dict[str, Any] = {
    "requests": 812,
    "requests_ok": 809,
    "requests_cancelled": 2,
    "requests_error": 1,
    "prompt_tokens": 104_120,
    "cached_tokens": 52_060,
    "completion_tokens": 51_800,
    "preemptions": 4,
    "queue_s": TIMES,
    "engines": {
        "kv_usage": {"count": 600, "p50": 0.382, "p95": 0.551, "p99": 0.619},
        "kv_usage_now": 0.41,
        "waiting": {"count": 600, "p50": 0, "p95": 2, "p99": 5},
        "waiting_now": 1,
        "preemptions": 7,
        "prefix_queries": 1000,
        "prefix_hits": 590,
    },
}


def answer(monkeypatch: pytest.MonkeyPatch, stats: httpx.Response, metrics: str = "") -> list[str]:
    monkeypatch.setenv("LORAPLEX_URL", "http://gateway")
    monkeypatch.setenv("LORAPLEX_API_KEY", "lpx_key")
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/v1/stats":
            asked.append(request.url.query.decode())
            return stats
        if request.url.path == "/metrics":
            return httpx.Response(200, text=metrics)
        error = {"message": "no", "type": "t", "param": None, "code": "permission_denied"}
        if request.url.path == "/api/v1/fleet":
            return httpx.Response(403, json={"error": error})
        return httpx.Response(200, json={"data": []})

    monkeypatch.setattr("loraplex.cli.status.Connection", partial(Connection, transport=httpx.MockTransport(handle)))
    return asked


def find_row(shown: str, name: str) -> list[str]:
    (line,) = [line for line in shown.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split("  ")


def test_the_numbers_are_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = answer(monkeypatch, httpx.Response(200, json={"window": "1h", "total": TOTAL}))
    assert main(["status", "--window", "1h"]) == 0
    assert asked == ["window=1h"]
    shown = capsys.readouterr().out
    assert "\nThe last hour" in shown
    assert "\n812 requests (1 failed, 2 cancelled), 104,120 prompt and 51,800 completion tokens" in shown
    rows = {
        "KV cache used": ["41.0 %", "38.2 %", "55.1 %", "61.9 %"],
        "requests waiting": ["1", "0", "2", "5"],
        "preemptions, in all": ["7", "-", "-", "-"],
        "prompt found in prefix cache": ["59.0 %", "-", "-", "-"],
        "queue": ["-", "4.1 ms", "90.4 ms", "1.25 s"],
        "prefill": ["-", "-", "-", "-"],
    }
    for name, cells in rows.items():
        assert [found.strip() for found in find_row(shown, name) if found.strip()] == cells


def test_they_are_json_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch, httpx.Response(200, json={"window": "10m", "total": TOTAL}))
    assert main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["stats"]
    assert found["window"] == "10m"
    assert found["total"]["queue_s"] == TIMES
    assert found["total"]["engines"]["kv_usage"]["p99"] == 0.619


@pytest.mark.parametrize("status", [403, 404])
def test_without_them_the_rest_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    error = {"message": "no", "type": "t", "param": None, "code": "permission_denied"}
    answer(monkeypatch, httpx.Response(status, json={"error": error}))
    assert main(["status"]) == 0
    assert "The last" not in capsys.readouterr().out


def test_a_tenant_sees_its_own_share_of_cached_tokens_and_no_engine() -> None:
    total = StatsRow(requests=3, prompt_tokens=100, cached_tokens=25, preemptions=2)
    assert list_gauges(total) == [
        ("preemptions, in all", "2", None, None, None),
        ("prompt found in prefix cache", "25.0 %", None, None, None),
    ]
    assert list_gauges(StatsRow()) == []


def test_idle_engines_are_shown_without_requests() -> None:
    rows = list_gauges(StatsRow(engines=EngineStats(kv_usage=Quantiles(count=5, p50=0.5))))
    assert rows[0] == ("KV cache used", "0.0 %", "50.0 %", "0.0 %", "0.0 %")
    assert rows[-1] == ("prompt found in prefix cache", None, None, None, None)
    assert describe_requests(StatsRow()) == "no requests"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 ms"),
        (0.00981, "9.81 ms"),
        (0.25, "250 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (3.05, "3.05 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_times_have_three_digits(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown


@pytest.mark.parametrize(("value", "says"), [("1.0", True), ("0.0", False)])
def test_a_redis_that_is_missed_is_shown(
    value: str, says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, httpx.Response(404, json={}), f"# TYPE x gauge\nloraplex_limits_degraded {value}\n")
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert ("redis  does not answer: each gateway counts limits alone" in shown) is says
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["has_lost_redis"] is says
