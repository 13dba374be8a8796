"""A whole benchmark: probe, warm up, repeat against one server or two in turn, and gather what was seen."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import numpy as np

from loraplex.bench.client import Server
from loraplex.bench.errors import BenchError
from loraplex.bench.figure import count_needed, thin
from loraplex.bench.ledger import find_platform_times
from loraplex.bench.load import Load, Measured, plan_arrivals, run_in_loop, send_load
from loraplex.bench.probe import probe
from loraplex.bench.refusal import find_gaps_in_figures, find_problems, keeps_up
from loraplex.bench.result import ClientFacts, Repeat, Result
from loraplex.bench.scrape import find_server_times, read_samples
from loraplex.bench.slo import is_good
from loraplex.bench.stamp import build_stamp, count_busy_s, scrape
from loraplex.bench.text import Text
from loraplex.bench.workload import Request, Workload, build_requests

_WARMUP_CONCURRENCY = 8
_MAX_GAPS = 2001
_WARMUP_REPEAT = -1


class Watcher(Protocol):
    """Shows how far it is."""

    def begin(self, label: str, total: int) -> None:
        """Another stretch of so many requests begins."""

    def advance(self) -> None:
        """One request of it is over."""


@dataclass(frozen=True)
class Bench:
    """Everything that is asked for; `flags` are stamped as they were given."""

    servers: Mapping[str, Server]
    workload: Workload
    load: Load
    num_requests: int
    num_repeats: int = 5
    num_warmup: int = 16
    seed: int = 0
    slo: Mapping[str, float] = field(default_factory=dict)
    metrics_url: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> str:
        """The name of the server that `--url` gives."""
        return next(iter(self.servers))


def check_size(bench: Bench) -> None:
    """Return if there are enough requests to say anything.

    Raises:
        BenchError: There are not.
    """
    if bench.num_requests < count_needed(50):
        raise BenchError(
            f"{bench.num_requests} requests say nothing: a median needs {count_needed(50)}, p95 {count_needed(95)}, "
            f"p99 {count_needed(99)}.",
            param="requests",
        )
    if bench.load.concurrency is not None and bench.num_requests < bench.load.concurrency:
        raise BenchError(
            f"{bench.num_requests} requests never have {bench.load.concurrency} open at once; take more --requests.",
            param="requests",
        )


def take_bench(bench: Bench, text: Text, watcher: Watcher) -> Result:
    """Take all repeats and return the result.

    Raises:
        BenchError: It cannot be taken.
    """
    check_size(bench)
    result = open_result(bench)
    text = prepare(bench, text, watcher)
    for number in range(bench.num_repeats):
        # the first of a pair is the second of the next, so that a machine that slows down slows both
        names = list(bench.servers) if number % 2 == 0 else list(bench.servers)[::-1]
        for name in names:
            requests = build_requests(bench.workload, text, bench.num_requests, bench.seed, number)
            label = f"repeat {number + 1} of {bench.num_repeats}" + (f", {name}" if len(names) > 1 else "")
            result.repeats.append(take_repeat(bench, name, number, requests, bench.load, watcher, label))
    result.repeats.sort(key=lambda repeat: list(bench.servers).index(repeat.server))
    result.problems = find_problems(result.repeats)
    result.notes = find_gaps_in_figures(result.repeats)
    return result


def open_result(bench: Bench) -> Result:
    """Return a result that has its stamp and question, and no answer yet."""
    return Result(stamp=build_stamp(bench.flags, bench.servers), workload=describe_question(bench), slo=dict(bench.slo))


def prepare(bench: Bench, text: Text, watcher: Watcher) -> Text:
    """Probe and warm up each server; returns how to write prompts, which are the same for all: as the first counts."""
    texts = [probe(server, bench.workload, text, bench.load.timeout_s) for server in bench.servers.values()]
    if bench.num_warmup:
        for name in bench.servers:
            _warm_up(bench, name, texts[0], watcher)
    return texts[0]


def take_repeat(
    bench: Bench, name: str, number: int, requests: list[Request], load: Load, watcher: Watcher, label: str
) -> Repeat:
    """Send one load of requests to one server and return what was seen."""
    server = bench.servers[name]
    if load.rate is not None:
        requests = plan_arrivals(requests, load.rate, random.Random(f"arrivals {bench.seed} {number}"))  # noqa: S311
    watcher.begin(label, len(requests))
    before, busy_s = read_samples(scrape(server, bench.metrics_url)), count_busy_s()
    started_at = dt.datetime.now(dt.UTC)
    measured = run_in_loop(send_load(server, bench.workload.path, requests, load, watcher.advance))
    own_s, all_s = measured.pulse.cpu_share * measured.seconds, count_busy_s()
    others = None if busy_s is None or all_s is None else max(0.0, all_s - busy_s - own_s) / measured.seconds
    times = find_server_times(before, read_samples(scrape(server, bench.metrics_url))) if before else {}
    repeat = build_repeat(name, number, measured, load, bench.slo)
    repeat.started_at = started_at.isoformat(timespec="seconds")
    repeat.server_times = times or find_platform_times(server, started_at, dt.datetime.now(dt.UTC), repeat.num_ok)
    repeat.client = msgspec.structs.replace(repeat.client, other_cores=others)
    return repeat


def build_repeat(name: str, number: int, measured: Measured, load: Load, slo: Mapping[str, float]) -> Repeat:
    """Return the figures of one run from what its clients saw."""
    outcomes = sorted(measured.outcomes, key=lambda outcome: outcome.planned_at)
    answered = [outcome for outcome in outcomes if not outcome.error]
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    gaps = [gap for outcome in answered for gap in outcome.gaps_s]
    num_good = sum(is_good(outcome, slo) for outcome in answered) if slo else None
    offered = len(outcomes) / measured.planned_s if load.is_open and measured.planned_s else None
    late = [outcome.started_at - outcome.planned_at for outcome in outcomes]
    return Repeat(
        server=name,
        number=number,
        started_at="",
        seconds=measured.seconds,
        offered_rate=load.rate or offered,
        concurrency=load.concurrency,
        num_requests=len(outcomes),
        errors=dict(sorted(errors.items())),
        error_messages={outcome.error: outcome.message for outcome in reversed(outcomes) if outcome.error},
        prompt_tokens=sum(outcome.prompt_tokens for outcome in answered),
        cached_tokens=sum(outcome.cached_tokens for outcome in answered),
        completion_tokens=sum(outcome.completion_tokens for outcome in answered),
        num_gaps=len(gaps),
        goodput=None if num_good is None else num_good / measured.seconds,
        good_share=None if num_good is None else num_good / len(outcomes),
        samples={
            "ttft": [outcome.first_s for outcome in answered],
            "itl": [outcome.token_s for outcome in answered if outcome.token_s is not None],
            "gap": thin(gaps, _MAX_GAPS),
            "request": [outcome.request_s for outcome in answered],
        },
        planned_s=[outcome.planned_at - measured.began_at for outcome in answered],
        server_times={},
        client=ClientFacts(
            cpu_share=measured.pulse.cpu_share,
            lag_p99_s=_percentile_99(measured.pulse.lags_s),
            late_p99_s=_percentile_99(late) if load.is_open else 0.0,
        ),
        keeps_up=keeps_up(measured, load),
    )


def describe_question(bench: Bench) -> dict[str, Any]:
    """Return what was asked, in words that two results can be held against each other by."""
    work, load = bench.workload, bench.load
    return {
        "route": work.path,
        "models": list(work.models),
        "popularity": work.popularity if len(work.models) > 1 else "one model",
        "prompt": str(work.prompt) if not work.trace else "as the trace says",
        "output": str(work.output) if not work.trace else "as the trace says",
        "prefix": {"tokens": work.prefix_len, "share": work.prefix_share, "prefixes": work.num_prefixes}
        if work.prefix_len
        else None,
        "same_prefix": work.has_same_prefix,
        "ignore_eos": work.ignores_eos,
        "extra": dict(work.extra),
        "rate": load.rate if load.rate or load.concurrency else "as the trace says",
        "concurrency": load.concurrency,
        "requests": bench.num_requests,
        "seed": bench.seed,
    }


def _warm_up(bench: Bench, name: str, text: Text, watcher: Watcher) -> None:
    """Ask every model in turn, so that it is loaded and the server's caches and compilers have run."""
    workload = replace(bench.workload, popularity="distinct")
    num = max(bench.num_warmup, len(workload.models))
    requests = build_requests(workload, text, num, bench.seed, _WARMUP_REPEAT)
    load = Load(concurrency=bench.load.concurrency or _WARMUP_CONCURRENCY, timeout_s=bench.load.timeout_s)
    watcher.begin(f"warm-up, {name}" if len(bench.servers) > 1 else "warm-up", len(requests))
    measured = run_in_loop(send_load(bench.servers[name], workload.path, requests, load, watcher.advance))
    failed = [outcome for outcome in measured.outcomes if outcome.error]
    if len(failed) == len(measured.outcomes):
        raise BenchError(f"Every request of the warm-up failed: {failed[0].error}: {failed[0].message}")


def _percentile_99(values: list[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0
