"""What `loraplex bench` asks and how it judges: lengths, popularity, tokens by usage, intervals, refusals, the page."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loraplex.bench.client import read_server
from loraplex.bench.compare import check_same_question, compare_results, compare_servers
from loraplex.bench.errors import BenchError
from loraplex.bench.figure import count_needed, spread
from loraplex.bench.interval import compare_blocks, compare_groups, compare_pairs, find_t
from loraplex.bench.length import Lengths, read_lengths
from loraplex.bench.load import Load, Measured, plan_arrivals
from loraplex.bench.outcome import Event, Outcome
from loraplex.bench.page import render_page
from loraplex.bench.popularity import build_chooser
from loraplex.bench.pulse import Pulse
from loraplex.bench.refusal import find_gaps_in_figures, find_problems, keeps_up
from loraplex.bench.result import Repeat, Result, Stamp, read_result
from loraplex.bench.run import Bench, build_repeat
from loraplex.bench.scrape import find_server_times, read_samples
from loraplex.bench.slo import is_good, read_slo
from loraplex.bench.svg import find_ticks
from loraplex.bench.text import Text, read_vocabulary
from loraplex.bench.trace import read_trace
from loraplex.bench.workload import Request, Workload, build_requests
from loraplex.cli.bench import describe_size

MODELS = ("a", "b", "c", "d")
LOAD = Load(concurrency=4)
WORK = Workload(MODELS, Lengths(8, 8), Lengths(4, 4))


def build_run(
    server: str = "http://one",
    number: int = 0,
    *,
    first_s: float = 0.1,
    num: int = 60,
    num_failed: int = 0,
    load: Load = LOAD,
    spread_s: float = 0.01,
) -> Repeat:
    rng = random.Random(f"{server} {number}")
    outcomes = []
    for index in range(num):
        outcome = Outcome("a", planned_at=index * 0.01, started_at=index * 0.01)
        outcome.first_at = outcome.planned_at + first_s + rng.uniform(0, spread_s)
        outcome.last_at = outcome.end_at = outcome.first_at + 0.3 * first_s
        outcome.completion_tokens, outcome.prompt_tokens, outcome.gaps_s = 4, 8, [0.1 * first_s] * 3
        if index < num_failed:
            outcome.error, outcome.message = "429 rate_limit_exceeded", "<script>Too fast.</script>"
        outcomes.append(outcome)
    return build_repeat(server, number, Measured(outcomes, 0.0, 1.0, 0.6, Pulse()), load, {})


def build_result(*repeats: Repeat, **workload: Any) -> Result:
    stamp = Stamp(
        taken_at="2027-01-01T00:00:00+00:00",
        versions={"loraplex": "1"},
        machine={"cpu": "x", "cores": 2},
        flags={},
        servers={one.server: {"url": one.server} for one in repeats},
    )
    return Result(stamp=stamp, workload={"prompt": "8", "models": ["a"]} | workload, repeats=list(repeats))


@pytest.mark.parametrize(
    ("text", "low", "high"), [("128", 128, 128), ("uniform:3-9", 3, 9), ("lognormal:20,0.8", 1, 200)]
)
def test_lengths_stay_within_what_their_text_says(text: str, low: int, high: int) -> None:
    rng, lengths = random.Random(0), read_lengths(text, "prompt")
    drawn = [lengths.draw(rng) for _ in range(2000)]
    assert (lengths.low, lengths.high) == (low, high)
    assert read_lengths(str(lengths), "prompt") == lengths
    assert low <= min(drawn) <= max(drawn) <= high


def test_lognormal_lengths_have_their_median_and_a_tail() -> None:
    rng, lengths = random.Random(0), read_lengths("lognormal:200,0.8,2000", "prompt")
    drawn = sorted(lengths.draw(rng) for _ in range(4001))
    assert drawn[2000] == pytest.approx(200, rel=0.1)
    assert drawn[3800] == pytest.approx(200 * math.exp(0.8 * 1.645), rel=0.15)


@pytest.mark.parametrize("text", ["0", "x", "uniform:9-3", "lognormal:0,1", "uniform:0-4", "lognormal:50,1,20"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BenchError, match="length"):
        read_lengths(text, "prompt")


def _count(kind: str, num: int = 4000) -> Counter[str]:
    choose = build_chooser(kind, MODELS, random.Random(0))
    return Counter(choose(index) for index in range(num))


def test_popularity_is_what_its_name_says() -> None:
    assert _count("identical") == {"a": 4000}
    assert _count("distinct") == dict.fromkeys(MODELS, 1000)
    assert all(count == pytest.approx(1000, rel=0.1) for count in _count("uniform").values())
    skewed, zipf = _count("skewed"), _count("zipf:1")
    assert [round(skewed["a"] / skewed[name]) for name in "bc"] == [3, 9]
    assert [zipf["a"] / zipf[name] for name in "bcd"] == pytest.approx([2, 3, 4], rel=0.15)
    with pytest.raises(BenchError, match="zipf"):
        build_chooser("popular", MODELS, random.Random(0))


def test_requests_are_the_same_for_every_server_and_new_in_every_repeat() -> None:
    work = replace(WORK, prompt=Lengths(4, 40), popularity="zipf")
    assert build_requests(work, Text(), 20, 0, 1) == build_requests(work, Text(), 20, 0, 1)
    first, second = ({one.body for one in build_requests(work, Text(), 20, 0, repeat)} for repeat in (0, 1))
    assert not first & second


def _prompts(work: Workload, repeat: int) -> list[str]:
    return [msgspec.json.decode(one.body)["prompt"] for one in build_requests(work, Text(), 200, 0, repeat)]


def test_share_of_prompts_begins_alike_and_anew_in_each_repeat() -> None:
    work = replace(WORK, prefix_len=30, prefix_share=0.5)
    begun = [[" ".join(prompt.split()[:30]) for prompt in _prompts(work, repeat)] for repeat in (0, 1)]
    (prefix, num), (other, _) = (Counter(one).most_common(1)[0] for one in begun)
    assert num == pytest.approx(100, abs=25)
    assert prefix != other
    assert {len(prompt.split()) for prompt in _prompts(work, 0)} == {8, 38}
    same = replace(work, has_same_prefix=True)
    assert _prompts(same, 0)[0] != _prompts(same, 1)[0]
    shared = (Counter(" ".join(one.split()[:30]) for one in _prompts(same, repeat)) for repeat in (0, 1))
    assert len({counted.most_common(1)[0][0] for counted in shared}) == 1


def test_prompts_weigh_what_the_server_counts() -> None:
    text = Text().fit(16, 16 * 2 + 10, 80, 80 * 2 + 10)
    assert (text.tokens_per_word, text.overhead) == (2, 10)
    assert len(text.make(40, random.Random(0)).split()) == 20
    (request,) = build_requests(replace(WORK, prompt=Lengths(50, 50)), text, 1, 0, 0)
    assert len(msgspec.json.decode(request.body)["prompt"].split()) == 20
    with pytest.raises(BenchError, match="usage"):
        Text().fit(16, 5, 80, 5)


def test_vocabulary_has_whole_words_only(tmp_path: Path) -> None:
    letters = "abcdefghij"
    pieces = [f"Ġ{one}{two}tle" for one in letters for two in letters for _ in "x"] + ["ĠIX", "tle", "Ġ12345", "Ġüber"]
    (tmp_path / "tokenizer.json").write_bytes(msgspec.json.encode({"model": {"vocab": dict.fromkeys(pieces, 0)}}))
    text = read_vocabulary(tmp_path)
    assert len(text.words) == 100
    assert text.is_exact
    with pytest.raises(BenchError, match=re.escape("tokenizer.json")):
        read_vocabulary(tmp_path / "nowhere.json")


def test_trace_is_sent_by_its_own_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 12.5, "prompt_tokens": 7, "max_tokens": 3}\n\n'
        '{"timestamp": 10, "prompt": "Hello", "max_tokens": 2, "model": "z", "other": 1}\n'
    )
    requests = build_requests(replace(WORK, trace=tuple(read_trace(path)), popularity="identical"), Text(), 9, 0, 0)
    assert [(one.at_s, one.model) for one in requests] == [(0, "z"), (2.5, "a")]
    bodies = [msgspec.json.decode(one.body) for one in requests]
    assert (bodies[0]["prompt"], bodies[1]["max_tokens"], len(bodies[1]["prompt"].split())) == ("Hello", 3, 7)


@pytest.mark.parametrize("line", ["x", '{"timestamp": 1}', '{"timestamp": 1, "max_tokens": 4}'])
def test_line_of_a_trace_that_is_no_request_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "prompt_tokens": 7, "max_tokens": 3}\n' + line)
    with pytest.raises(BenchError, match="Line 2"):
        read_trace(path)


def test_arrivals_keep_the_rate_exactly_and_are_spread_as_by_chance() -> None:
    planned = [one.at_s for one in plan_arrivals([Request("a", b"")] * 2000, 10.0, random.Random(0))]
    assert planned == sorted(planned)
    assert max(planned) == pytest.approx(200, rel=0.01)
    waits = np.diff(planned)
    # an exponential's deviation is its mean; a steady beat's would be 0
    assert float(np.std(waits) / np.mean(waits)) == pytest.approx(1, abs=0.08)


def _event(text: str) -> Event:
    return msgspec.json.decode(text, type=Event)


def test_tokens_are_those_of_usage_and_not_the_pieces() -> None:
    outcome = Outcome("a", planned_at=1.0)
    outcome.take(_event('{"choices": [{"text": "one two"}]}'), 2.0)
    outcome.take(_event('{"choices": [{"text": " three four five", "finish_reason": "length"}]}'), 4.0)
    outcome.take(_event('{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}'), 4.5)
    outcome.finish()
    assert (outcome.error, outcome.completion_tokens, outcome.first_s, outcome.gaps_s) == ("", 5, 1.0, [2.0])
    assert outcome.token_s == 0.5


def test_first_token_of_a_chat_is_not_the_role() -> None:
    outcome = Outcome("a", planned_at=0.0)
    outcome.take(_event('{"choices": [{"delta": {"role": "assistant", "content": ""}}]}'), 1.0)
    outcome.take(_event('{"choices": [{"delta": {"content": "Hi"}}]}'), 2.0)
    outcome.take(_event('{"choices": [{"delta": {}, "finish_reason": "stop"}]}'), 3.0)
    assert (outcome.first_at, outcome.last_at) == (2.0, 2.0)


def test_answer_without_usage_is_an_error_and_not_counted_by_its_pieces() -> None:
    outcome = Outcome("a", planned_at=0.0)
    outcome.take(_event('{"choices": [{"text": "one"}]}'), 1.0)
    outcome.finish()
    assert outcome.error == "no_usage"


def test_errors_are_named_by_status_and_code() -> None:
    refused, streamed, odd = (Outcome("a", planned_at=0.0) for _ in range(3))
    refused.refuse(429, b'{"error": {"message": "Slow down.", "code": "rate_limit_exceeded"}}')
    streamed.take(_event('{"error": {"message": "Gone.", "code": "engine_error"}}'), 1.0)
    odd.refuse(502, b"<html>Bad gateway")
    assert [one.error for one in (refused, streamed, odd)] == ["429 rate_limit_exceeded", "stream engine_error", "502"]
    assert odd.message == "<html>Bad gateway"


def test_slo_counts_what_keeps_every_bound() -> None:
    outcome = Outcome("a", planned_at=0.0, first_at=0.4, last_at=1.4, end_at=1.5, completion_tokens=11)
    outcome.gaps_s = [0.1] * 8 + [0.2]
    assert is_good(outcome, read_slo("ttft=0.5,itl=0.11"))
    assert not is_good(outcome, read_slo("ttft=0.5,itl=0.09"))
    assert not is_good(outcome, read_slo("gap=0.15"))
    outcome.error = "500"
    assert not is_good(outcome, read_slo("ttft=0.5"))
    for text in ("ttft", "ttft=0", "tfft=1", "ttft=nan"):
        with pytest.raises(BenchError, match="ttft"):
            read_slo(text)


def test_percentile_is_told_only_of_enough_values() -> None:
    assert [count_needed(percent) for percent in (50, 95, 99)] == [5, 59, 299]
    few, more = spread([1.0] * 58), spread([1.0] * 299)
    assert (few.p50, few.p95, more.p99) == (1.0, None, 1.0)
    told = find_gaps_in_figures([build_run(num=60), build_run(number=1, num=60)])
    assert told == ["Too few requests, 120 in all repeats together: p99 needs 299; take more --requests or --repeats."]


def test_student_t_has_its_known_quantiles() -> None:
    known = {(0.95, 2): 4.3027, (0.95, 4): 2.7764, (0.99, 10): 3.1693, (0.95, 1000): 1.9623}
    assert {key: round(find_t(*key), 4) for key in known} == known


def test_runs_are_the_unit_so_that_what_differs_between_runs_does_not_cry() -> None:
    rng, num_trials = np.random.default_rng(0), 200

    def take_run() -> np.ndarray:
        # each run is off by 5 % as a whole: a hundred requests of one know nothing of that
        return np.exp(rng.normal(0, 0.05) + rng.normal(0, 0.02, 100))

    wrong_runs = wrong_blocks = 0
    for _ in range(num_trials):
        before, after = ([take_run() for _ in range(5)] for _ in range(2))
        ratio = compare_groups([np.median(run) for run in before], [np.median(run) for run in after], 0.95)
        wrong_runs += not ratio.low <= 1 <= ratio.high
        if wrong_blocks < 20:
            ratio = compare_blocks(before[0].tolist(), after[0].tolist(), 50, 4, 0.95)
            wrong_blocks += not ratio.low <= 1 <= ratio.high
    assert wrong_runs / num_trials < 0.1
    # single runs do cry, which is why there is no verdict on them
    assert wrong_blocks == 20


def test_pairs_take_out_what_slows_both() -> None:
    drift = [1.0, 1.3, 1.7, 1.2, 0.9]
    before, after = drift, [one * factor for one, factor in zip(drift, (1.1, 1.11, 1.1, 1.09, 1.1), strict=True)]
    paired, grouped = compare_pairs(before, after, 0.95), compare_groups(before, after, 0.95)
    assert paired.low > 1.08
    assert grouped.low < 1 < grouped.high
    assert paired.value == pytest.approx(grouped.value)


def test_comparison_finds_what_is_slower_and_names_it() -> None:
    before = build_result(*(build_run(number=number) for number in range(4)))
    slower = build_result(*(build_run(number=10 + number, first_s=0.115) for number in range(4)))
    again = build_result(*(build_run(number=20 + number) for number in range(4)))
    found = compare_results(before, slower)
    assert found.verdict == "worse"
    assert {one.verdict for one in found.changes if one.name.startswith("ttft")} == {"worse"}
    assert compare_results(slower, before).verdict == "better"
    assert compare_results(before, again).verdict in ("same", "unclear")
    assert "Welch" in found.method


def test_single_runs_and_refused_results_get_no_verdict() -> None:
    one, other = build_result(build_run()), build_result(build_run(number=1, first_s=0.2))
    alone = compare_results(one, other)
    assert alone.verdict == "unclear"
    assert "repeats" in alone.notes[0]
    many = [
        build_result(*(build_run(number=start + k, first_s=first) for k in range(3)))
        for start, first in ((0, 0.1), (9, 0.2))
    ]
    many[1].problems = ["The client is saturated."]
    assert compare_results(*many).verdict == "unclear"
    assert "saturated" in compare_results(*many).notes[0]


def test_servers_that_took_turns_are_compared_by_pairs() -> None:
    runs = [
        build_run(server, number, first_s=first) for server, first in (("x", 0.1), ("y", 0.13)) for number in range(3)
    ]
    found = compare_servers(build_result(*runs))
    assert (found.before, found.after, found.verdict) == ("x", "y", "worse")
    assert "3 pairs" in found.method


def test_baseline_that_asked_something_else_is_refused() -> None:
    before = build_result(build_run(), rate=4)
    check_same_question(before, {"prompt": "8", "models": ["z"], "rate": 4})
    with pytest.raises(BenchError, match="rate 4 and 8"):
        check_same_question(before, {"prompt": "8", "models": ["a"], "rate": 8})


def test_failures_a_saturated_client_and_a_late_one_are_refused() -> None:
    failed, busy, lagging, late = build_run(num_failed=3), build_run(), build_run(), build_run()
    for run, name, value in ((busy, "cpu_share", 0.97), (lagging, "lag_p99_s", 0.06), (late, "late_p99_s", 0.06)):
        run.client = msgspec.structs.replace(run.client, **{name: value})
    (told,) = find_problems([failed])
    assert told.startswith("3 of 60 requests to http://one failed (3 x 429 rate_limit_exceeded)")
    assert "saturated: it used 0.97" in find_problems([busy])[0]
    assert "saturated: its own loop was 60 ms late" in find_problems([lagging])[0]
    assert "rate was not kept" in find_problems([late])[0]
    assert find_problems([build_run()]) == []


@pytest.mark.parametrize(("served_per_s", "is_kept"), [(40.0, True), (7.0, False)])
def test_rate_is_kept_while_the_queue_does_not_grow(served_per_s: float, is_kept: bool) -> None:
    arrivals = [one.at_s for one in plan_arrivals([Request("a", b"")] * 300, 10.0, random.Random(1))]
    outcomes, free_at = [], 0.0
    for at_s in arrivals:
        free_at = max(free_at, at_s) + 1 / served_per_s
        outcomes.append(Outcome("a", at_s, end_at=free_at))
    assert keeps_up(Measured(outcomes, 0.0, 0.0, arrivals[-1]), Load(rate=10.0)) is is_kept


def test_server_metrics_tell_queue_and_prefill() -> None:
    lines = (
        '{name}_bucket{{le="0.1"}} {a}\n{name}_bucket{{le="0.2"}} {b}\n{name}_bucket{{le="+Inf"}} {b}\n{name}_sum {c}\n'
    )
    before = lines.format(name="vllm:request_queue_time_seconds", a=5, b=5, c=0.3)
    after = lines.format(name="vllm:request_queue_time_seconds", a=15, b=305, c=45.3)
    found = find_server_times(read_samples(before), read_samples(after))
    assert set(found) == {"queue"}
    assert (found["queue"].num, found["queue"].mean) == (300, pytest.approx(0.15))
    assert found["queue"].p50 == pytest.approx(0.1 + 0.1 * 140 / 290)
    assert find_server_times(read_samples(after), read_samples(after)) == {}


def test_url_may_end_in_v1_and_must_be_one() -> None:
    assert read_server("https://api.example.com/v1/").url == "https://api.example.com"
    assert "secret" not in repr(read_server("http://127.0.0.1:8000", "secret"))
    for url in ("127.0.0.1:8000", "ftp://x", ""):
        with pytest.raises(BenchError, match="URL"):
            read_server(url)


def test_result_survives_its_file(tmp_path: Path) -> None:
    result = build_result(build_run(), build_run(number=1))
    path = tmp_path / "result.json"
    path.write_bytes(msgspec.json.encode(result))
    assert read_result(path) == result
    path.write_text('{"format": "other"}')
    with pytest.raises(BenchError, match="no result"):
        read_result(path)


def test_page_needs_nothing_else_and_escapes_what_servers_say() -> None:
    runs = [build_run(server, number, num_failed=1) for server in ("http://x", "http://<b>") for number in range(3)]
    result = build_result(*runs)
    result.comparison = compare_servers(result)
    page = render_page(result)
    assert "<script" not in page
    assert "<b>" not in page
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert page.count("<svg") == 7


def test_ticks_are_round() -> None:
    assert find_ticks(0, 97) == [0, 20, 40, 60, 80]
    assert find_ticks(0.93, 1.07) == [0.95, 1.0, 1.05]


def test_the_size_of_a_run_is_said_before_it() -> None:
    one, two = read_server("http://one", ""), read_server("http://two", "")
    lengths = read_lengths("8", "prompt")
    workload = Workload(models=("m",), prompt=lengths, output=lengths)
    asked = Bench({one.url: one, two.url: two}, workload, Load(concurrency=4), 300, num_repeats=5, num_warmup=0)
    said = "5 repeats (--repeats) of 300 requests (--requests) are sent to each of the two servers, 3,000 in all."
    assert describe_size(asked, is_sweep=False) == said
    swept = replace(asked, servers={one.url: one}, num_warmup=16)
    assert describe_size(swept, is_sweep=True).startswith("Each step of the sweep sends 300 requests or more")
    assert "after 16 to warm up" in describe_size(swept, is_sweep=True)
