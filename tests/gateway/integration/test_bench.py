"""`loraplex bench` against servers whose latencies are planted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex.bench.client import Server
from loraplex.bench.compare import compare_results, compare_servers
from loraplex.bench.errors import BenchError
from loraplex.bench.length import Lengths
from loraplex.bench.load import Load
from loraplex.bench.result import Repeat, Result
from loraplex.bench.run import Bench, open_result, take_bench, take_repeat
from loraplex.bench.sweep import take_sweep
from loraplex.bench.text import Text
from loraplex.bench.workload import Workload, build_requests
from loraplex.cli.app import main
from planted_server import Planted, planted_server

WORK = Workload(("base",), Lengths(8, 8), Lengths(6, 6))
SLOW = 1.10
"""The slowdown that is planted."""


@pytest.fixture(autouse=True)
def never_saturated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers and clients share a process here, and other tests the machine: that has tests of its own."""
    monkeypatch.setattr("loraplex.bench.refusal._SMALL_LAG_S", 60.0)


class Quiet:
    """Shows nothing."""

    def begin(self, label: str, total: int) -> None:
        """Nothing."""

    def advance(self) -> None:
        """Nothing."""


def ask(planted: Planted, load: Load, num: int, workload: Workload = WORK, number: int = 0, **options: Any) -> Repeat:
    bench = Bench({"x": Server(planted.url)}, workload, load, num, **options)
    requests = build_requests(workload, Text(), num, 0, number)
    return take_repeat(bench, "x", number, requests, load, Quiet(), "")


def test_times_and_tokens_are_those_that_were_planted() -> None:
    with planted_server(first_s=0.15, token_s=0.03, tokens_per_piece=2) as planted:
        repeat = ask(planted, Load(concurrency=4), 12)
    assert repeat.completion_tokens == 12 * 6
    assert repeat.prompt_tokens == 12 * 8
    times = repeat.times
    # three pieces of two tokens: two pauses of 60 ms, five later tokens; a busy machine is late, never early
    for name, planted_s in (("ttft", 0.15), ("gap", 0.06), ("itl", 0.12 / 5), ("request", 0.27)):
        assert 0.7 * planted_s < times[name].p50 < 4 * planted_s, name
    assert times["request"].p50 >= times["ttft"].p50 + times["gap"].p50


def test_closed_load_never_has_more_open_and_keeps_its_connections() -> None:
    with planted_server() as planted:
        ask(planted, Load(concurrency=5), 30)
        assert planted.most_open == 5
        # and those that ask for metrics and usage, of which there are none
        assert planted.num_connections <= 5 + 3


def test_platform_tells_queue_and_prefill_by_its_usage() -> None:
    rows = [{"queue_s": 0.25, "prefill_s": 0.5, "request_id": str(number)} for number in range(6)]
    with planted_server(usage=rows) as planted:
        told = ask(planted, Load(concurrency=3), 6).server_times
    assert {kind: (found.num, found.p50) for kind, found in told.items()} == {"queue": (6, 0.25), "prefill": (6, 0.5)}


def test_server_that_closes_its_connections_is_asked_over_new_ones() -> None:
    with planted_server(keeps_alive=False) as planted:
        assert ask(planted, Load(concurrency=3), 9).errors == {}


def test_stall_is_charged_to_all_that_was_to_be_sent_meanwhile() -> None:
    with planted_server(first_s=0.005, token_s=0.001) as planted:
        planted.stall_after = (0.5, 1.5)
        repeat = ask(planted, Load(rate=40), 80)
    # arrivals of a second, on average: half of them wait for more than half of it
    waited = [value for value in repeat.samples["ttft"] if value > 0.5]
    assert 8 <= len(waited) <= 60
    assert repeat.num_ok == 80


def test_time_begins_at_the_planned_moment_and_lateness_of_the_client_is_told() -> None:
    class Stuck(Quiet):
        is_stuck = False

        def advance(self) -> None:
            """The loop stands still, once."""
            if not self.is_stuck:
                self.is_stuck = True
                time.sleep(0.5)

    with planted_server(first_s=0.005, token_s=0.001) as planted:
        bench = Bench({"x": Server(planted.url)}, WORK, Load(rate=100), 50)
        repeat = take_repeat(bench, "x", 0, build_requests(WORK, Text(), 50, 0, 0), bench.load, Stuck(), "")
    assert max(repeat.samples["ttft"]) > 0.35
    assert repeat.client.late_p99_s > 0.35


def test_open_load_does_not_wait_for_answers() -> None:
    with planted_server(first_s=0.5) as planted:
        repeat = ask(planted, Load(rate=100), 50)
        assert planted.most_open > 30
    assert repeat.offered_rate == 100


def test_refusals_are_counted_by_code_and_leave_the_others_times() -> None:
    with planted_server(fail_every=4) as planted:
        repeat = ask(planted, Load(concurrency=4), 20, slo={"ttft": 10.0})
    assert repeat.errors == {"429 rate_limit_exceeded": 5}
    assert len(repeat.samples["ttft"]) == repeat.num_ok == 15
    assert repeat.good_share == 0.75


def test_server_without_usage_is_refused_at_once() -> None:
    with planted_server(has_usage=False) as planted:
        bench = Bench({"x": Server(planted.url)}, WORK, Load(concurrency=4), 20)
        with pytest.raises(BenchError, match="include_usage"):
            take_bench(bench, Text(), Quiet())


def test_nobody_at_the_url_is_said() -> None:
    bench = Bench({"x": Server("http://127.0.0.1:9")}, WORK, Load(concurrency=4), 20)
    with pytest.raises(BenchError, match="connection"):
        take_bench(bench, Text(), Quiet())


def test_each_model_may_have_its_own_key_and_is_warmed_up() -> None:
    work = Workload(("a", "b"), Lengths(8, 8), Lengths(2, 2), popularity="identical", is_chat=True)
    with planted_server(first_s=0.001, token_s=0.001, tokens_per_word=1.5) as planted:
        server = Server(planted.url, "first", {"b": "second"})
        take_bench(Bench({"x": server}, work, Load(concurrency=2), 6, num_repeats=1, num_warmup=1), Text(), Quiet())
        asked = [(body["model"], key) for body, key in zip(planted.bodies, planted.keys, strict=True)]
        num_words = len(planted.bodies[-1]["messages"][0]["content"].split())
    assert asked[:4] == [("a", "bearer first")] * 3 + [("b", "bearer second")]
    assert asked[4:] == [("a", "bearer first")] * 6
    assert num_words == round(8 / 1.5)


def test_sweep_of_rates_finds_the_knee() -> None:
    # eight seats of 120 ms: 66 requests a second
    with planted_server(first_s=0.12, token_s=0.0, max_open=8) as planted:
        work = Workload(("base",), Lengths(8, 8), Lengths(1, 1))
        bench = Bench({"x": Server(planted.url)}, work, Load(rate=16), 40, num_warmup=4)
        result = take_sweep(bench, Text(), Quiet())
    assert result.sweep is not None
    assert 16 <= (result.sweep.knee or 0) <= 90
    assert not result.sweep.steps[-1].is_kept


def test_sweep_of_concurrency_ends_where_more_brings_nothing() -> None:
    with planted_server(first_s=0.1, token_s=0.0, max_open=4) as planted:
        work = Workload(("base",), Lengths(8, 8), Lengths(1, 1))
        bench = Bench({"x": Server(planted.url)}, work, Load(concurrency=1), 12, num_warmup=4)
        result = take_sweep(bench, Text(), Quiet())
    assert result.sweep is not None
    # eight at once can bring a little more where the machine is busy
    assert result.sweep.knee in (4, 8)
    assert "tokens/s" in result.sweep.steps[-1].why


def take(planted: Planted, trial: int) -> Result:
    load = Load(concurrency=24)
    result = open_result(Bench({"x": Server(planted.url)}, WORK, load, 24))
    result.repeats = [ask(planted, load, 24, number=trial * 10 + number) for number in range(5)]
    return result


def count_worse(planted: Planted, num_trials: int, slowdown: float) -> int:
    num = 0
    for trial in range(num_trials):
        planted.slowdown = 1.0
        before = take(planted, 2 * trial)
        planted.slowdown = slowdown
        num += compare_results(before, take(planted, 2 * trial + 1)).verdict == "worse"
    return num


@pytest.mark.endure
def test_planted_slowdown_is_found_and_equal_runs_do_not_cry(long: Callable[[float, float], float]) -> None:
    num_trials = int(long(1, 20))
    with planted_server(first_s=0.3, token_s=0.04, noise=0.05) as planted:
        assert count_worse(planted, num_trials, SLOW) == num_trials
        assert count_worse(planted, num_trials, 1.0) == 0


def test_two_servers_take_turns_and_are_compared_by_pairs() -> None:
    options = {"first_s": 0.2, "token_s": 0.02, "noise": 0.05}
    with planted_server(**options) as one, planted_server(**options, slowdown=1.2) as other:
        servers = {"one": Server(one.url), "other": Server(other.url)}
        result = take_bench(Bench(servers, WORK, Load(concurrency=24), 24, num_warmup=4), Text(), Quiet())
        assert len(one.bodies) > 120
        asked = [sorted(body["prompt"] for body in planted.bodies) for planted in (one, other)]
        assert asked[0] == asked[1]
    found = compare_servers(result)
    assert (found.verdict, found.before) == ("worse", "one")


def test_command_writes_what_it_saw_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-one")
    saved, page = tmp_path / "before.json", tmp_path / "page.html"
    flags = [
        "--model",
        "base",
        "--concurrency",
        "10",
        "--requests",
        "20",
        "--repeats",
        "3",
        "--prompt",
        "8",
        "--output",
        "4",
    ]
    with planted_server(first_s=0.1, token_s=0.01) as planted:
        flags += ["--url", planted.url + "/v1", "--warmup", "2"]
        assert main(["bench", *flags, "--save", str(saved), "--html", str(page), "--json"]) == 0
        shown = json.loads(capfd.readouterr().out)
        assert set(planted.keys) == {"bearer sk-one"}
        planted.slowdown = 1.5
        assert main(["bench", *flags, "--compare", str(saved)]) == 1
    assert shown == json.loads(saved.read_bytes())
    assert "sk-one" not in saved.read_text() + page.read_text()
    assert msgspec.json.decode(saved.read_bytes(), type=Result).stamp.flags["concurrency"] == 10
    told = capfd.readouterr()
    assert "Worse than baseline" in told.err
    first, *_ = told.err.splitlines()
    assert first == "3 repeats (--repeats) of 20 requests (--requests) are sent, 60 in all, after 2 to warm up."
    assert "p99 needs 299" in told.err
