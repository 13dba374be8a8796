"""A sweep: heavier and heavier load up to the knee, the heaviest that the server still keeps.

By rate: doubled until the server does not keep up or misses the SLO, then halved in between. By concurrency: doubled
until that brings no more tokens a second; the knee is the least that gives nearly all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from loraplex.bench.refusal import MAX_ERROR_SHARE, find_client_problem, find_gaps_in_figures
from loraplex.bench.result import Repeat, Result, Step, Sweep
from loraplex.bench.run import Bench, Watcher, check_size, open_result, prepare, take_repeat
from loraplex.bench.text import Text
from loraplex.bench.workload import build_requests

GOOD_SHARE = 0.9
_MAX_DOUBLINGS, _NUM_HALVINGS = 12, 3
_NEARLY_ALL, _WORTH = 0.95, 1.05
_ROUNDS_OF_ALL = 4


def take_sweep(bench: Bench, text: Text, watcher: Watcher) -> Result:
    """Sweep from the load of `bench` upwards, one run a level, and return every step with the knee.

    Raises:
        BenchError: It cannot be taken.
    """
    check_size(bench)
    result = open_result(bench)
    fitted = prepare(bench, text, watcher)
    if bench.load.rate is not None:
        result.sweep = _sweep_rate(bench, fitted, watcher, bench.load.rate)
    else:
        result.sweep = _sweep_concurrency(bench, fitted, watcher, bench.load.concurrency or 1)
    result.sweep.steps.sort(key=lambda step: step.level)
    runs = [step.repeat for step in result.sweep.steps]
    found = (find_client_problem(run) for run in runs if run.num_ok)
    result.problems = [problem for problem in found if problem][:1]
    if result.sweep.knee is None:
        result.problems.append(f"Not even the first {result.sweep.by} was kept; begin lower.")
    elif result.sweep.by == "rate" and all(step.is_kept for step in result.sweep.steps):
        result.notes.append("The knee was not reached: every rate was kept. Begin higher.")
    result.notes += find_gaps_in_figures(runs[:1])
    return result


def _sweep_rate(bench: Bench, text: Text, watcher: Watcher, rate: float) -> Sweep:
    sweep = Sweep(by="rate", steps=[], knee=None)
    for _ in range(_MAX_DOUBLINGS):
        step = _take_step(bench, text, watcher, rate, len(sweep.steps))
        sweep.steps.append(step)
        if not step.is_kept:
            break
        sweep.knee, rate = rate, rate * 2
    if sweep.knee is None or sweep.steps[-1].is_kept:
        return sweep
    low, high = sweep.knee, rate
    for _ in range(_NUM_HALVINGS):
        middle = math.sqrt(low * high)
        step = _take_step(bench, text, watcher, middle, len(sweep.steps))
        sweep.steps.append(step)
        low, high = (middle, high) if step.is_kept else (low, middle)
    sweep.knee = low
    return sweep


def _sweep_concurrency(bench: Bench, text: Text, watcher: Watcher, concurrency: int) -> Sweep:
    sweep, best = Sweep(by="concurrency", steps=[], knee=None), 0.0
    for _ in range(_MAX_DOUBLINGS):
        step = _take_step(bench, text, watcher, concurrency, len(sweep.steps))
        sweep.steps.append(step)
        if step.is_kept and step.repeat.tokens_per_s < best * _WORTH:
            step.is_kept = False
            step.why = f"{concurrency / 2:g} gave {best:.0f} tokens/s"
        if not step.is_kept:
            break
        best, concurrency = step.repeat.tokens_per_s, concurrency * 2
    kept = [step for step in sweep.steps if step.is_kept]
    sweep.knee = next((step.level for step in kept if step.repeat.tokens_per_s >= _NEARLY_ALL * best), None)
    return sweep


def _take_step(bench: Bench, text: Text, watcher: Watcher, level: float, number: int) -> Step:
    is_rate = bench.load.rate is not None
    load = replace(bench.load, rate=level) if is_rate else replace(bench.load, concurrency=int(level))
    num_requests = bench.num_requests if is_rate else max(bench.num_requests, _ROUNDS_OF_ALL * int(level))
    requests = build_requests(bench.workload, text, num_requests, bench.seed, number)
    label = f"{level:.3g} requests/s" if is_rate else f"{level:g} at once"
    repeat = take_repeat(bench, bench.first, number, requests, load, watcher, label)
    why = find_reason(repeat)
    return Step(level=level, is_kept=not why, why=why, repeat=repeat)


def find_reason(repeat: Repeat) -> str:
    """Return why a load was too much; empty if it was kept."""
    failed = repeat.num_requests - repeat.num_ok
    if failed > MAX_ERROR_SHARE * repeat.num_requests:
        return f"{failed} of {repeat.num_requests} failed"
    if repeat.keeps_up is False:
        return f"{repeat.requests_per_s:.3g} requests/s done"
    if repeat.good_share is not None and repeat.good_share < GOOD_SHARE:
        return f"{repeat.good_share:.0%} within the SLO"
    return ""
