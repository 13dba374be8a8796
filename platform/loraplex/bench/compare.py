"""Whether two results differ: ratios with intervals, and a verdict that needs both a real and a relevant difference.

A figure is worse if its interval leaves out "no change" and the change itself is beyond the tolerance. The intervals
hold together (Bonferroni), so that one of seven figures does not cry by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loraplex.bench.errors import BenchError
from loraplex.bench.interval import MIN_RUNS, Ratio, compare_blocks, compare_groups, compare_pairs
from loraplex.bench.result import Change, Comparison, Repeat, Result

TOLERANCE = 0.03
_CONFIDENCE = 0.95
_MIN_VALUES = {50: 5, 95: 20}
"""Times that a run needs for its own percentile: how it varies from run to run is then in the interval."""
_IN_MACHINE = ("cpu", "cores")


@dataclass(frozen=True)
class _Figure:
    """One number of a run."""

    name: str
    read: Callable[[Repeat], float | None]
    is_cost: bool = True
    """Whether more is worse."""


def _time(name: str, percent: int) -> _Figure:
    def read(repeat: Repeat) -> float | None:
        values = repeat.samples.get(name, [])
        return float(np.percentile(values, percent)) if len(values) >= _MIN_VALUES[percent] else None

    return _Figure(f"{name} p{percent}", read)


_TIMES = tuple(_time(name, percent) for name in ("ttft", "itl", "request") for percent in (50, 95))
_THROUGHPUT = _Figure("tokens/s", lambda repeat: repeat.tokens_per_s, is_cost=False)
_GOODPUT = _Figure("goodput", lambda repeat: repeat.goodput, is_cost=False)
FIGURES = (_THROUGHPUT, _GOODPUT, *_TIMES)


def compare_results(before: Result, after: Result, tolerance: float = TOLERANCE) -> Comparison:
    """Return what changed from a baseline to a result that was taken at another time.

    Raises:
        BenchError: They asked different things, so that their figures cannot be compared.
    """
    check_same_question(before, after.workload)
    old, new = before.of(before.servers[0]), after.of(after.servers[0])
    notes = _note_machines(before, after)
    if min(len(old), len(new)) >= MIN_RUNS:
        changes = _compare_runs(old, new, compare_groups, tolerance)
        method = f"Welch's t over {len(old)} and {len(new)} repeats"
    else:
        changes = _compare_single(old, new, tolerance)
        method = "blocks of requests of single runs"
        notes.append(f"No verdict: {MIN_RUNS} repeats or more of both would show how much runs differ by themselves.")
    verdict = _judge(changes) if min(len(old), len(new)) >= MIN_RUNS else "unclear"
    for name, side in (("The baseline", before), ("This result", after)):
        if side.problems:
            notes.append(f"No verdict: {name.lower()} is refused: {side.problems[0]}")
            verdict = "unclear"
    return _build("baseline", "this run", verdict, changes, method, tolerance, notes)


def compare_servers(result: Result, tolerance: float = TOLERANCE) -> Comparison:
    """Return how the second server of a result differs from the first, over the pairs in which they took turns."""
    first, second = result.servers
    old, new = result.of(first), result.of(second)
    if len(old) < MIN_RUNS:
        changes = _compare_single(old, new, tolerance)
        notes = [f"No verdict: it takes {MIN_RUNS} pairs (--repeats {MIN_RUNS})."]
        return _build(first, second, "unclear", changes, "blocks of requests of single runs", tolerance, notes)
    changes = _compare_runs(old, new, compare_pairs, tolerance)
    notes, verdict = [], _judge(changes)
    if result.problems:
        notes.append(f"No verdict: the result is refused: {result.problems[0]}")
        verdict = "unclear"
    return _build(first, second, verdict, changes, f"Student's t over {len(old)} pairs", tolerance, notes)


def check_same_question(before: Result, asked: Mapping[str, Any]) -> None:
    """Return if a baseline asked the same.

    Raises:
        BenchError: It did not.
    """
    if before.sweep or not before.repeats:
        raise BenchError("A sweep is not compared; take one rate or one concurrency on both sides.", param="compare")
    names = sorted(before.workload.keys() | asked.keys())
    different = [
        f"{name} {before.workload.get(name)} and {asked.get(name)}"
        for name in names
        if name != "models" and before.workload.get(name) != asked.get(name)
    ]
    if different:
        raise BenchError(f"The baseline asked something else: {'; '.join(different)}.", param="compare")


def _compare_runs(
    old: Sequence[Repeat],
    new: Sequence[Repeat],
    compare: Callable[[Sequence[float], Sequence[float], float], Ratio],
    tolerance: float,
) -> list[Change]:
    columns: list[tuple[_Figure, list[float], list[float]]] = []
    # an open load decides its throughput itself
    figures = [figure for figure in FIGURES if figure is not _THROUGHPUT or old[0].offered_rate is None]
    for figure in figures:
        sides = [[figure.read(repeat) for repeat in side] for side in (old, new)]
        before, after = ([value for value in side if value] for side in sides)
        if len(before) == len(old) and len(after) == len(new):
            columns.append((figure, before, after))
    confidence = 1 - (1 - _CONFIDENCE) / max(1, len(columns))
    return [
        _build_change(figure, _middle(before), _middle(after), compare(before, after, confidence), tolerance)
        for figure, before, after in columns
    ]


def _compare_single(old: Sequence[Repeat], new: Sequence[Repeat], tolerance: float) -> list[Change]:
    confidence = 1 - (1 - _CONFIDENCE) / len(_TIMES)
    changes = []
    for figure in _TIMES:
        name, percent = figure.name.split(" p")
        before, after = ([value for repeat in side for value in repeat.samples.get(name, [])] for side in (old, new))
        if min(len(before), len(after)) >= _MIN_VALUES[int(percent)]:
            num_open = old[0].concurrency or 1
            ratio = compare_blocks(before, after, float(percent), num_open, confidence)
            was, is_now = (float(np.percentile(side, int(percent))) for side in (before, after))
            changes.append(_build_change(figure, was, is_now, ratio, tolerance))
    return changes


def _build_change(figure: _Figure, before: float, after: float, ratio: Ratio, tolerance: float) -> Change:
    cost = (ratio.value, ratio.low, ratio.high)
    if not figure.is_cost:
        cost = (1 / ratio.value, 1 / ratio.high, 1 / ratio.low)
    value, low, high = cost
    if low > 1 and value >= 1 + tolerance:
        verdict = "worse"
    elif high < 1 and value <= 1 / (1 + tolerance):
        verdict = "better"
    elif low >= 1 / (1 + tolerance) and high <= 1 + tolerance:
        verdict = "same"
    else:
        verdict = "unclear"
    return Change(
        name=figure.name,
        before=before,
        after=after,
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        verdict=verdict,
    )


def _judge(changes: Sequence[Change]) -> str:
    found = {change.verdict for change in changes}
    if {"worse", "better"} <= found:
        return "mixed"
    for verdict in ("worse", "better", "unclear", "same"):
        if verdict in found:
            return verdict
    return "unclear"


def _note_machines(before: Result, after: Result) -> list[str]:
    pairs = [(name, before.stamp.machine.get(name), after.stamp.machine.get(name)) for name in _IN_MACHINE]
    return [f"Another machine: {name} was {old}, is {new}." for name, old, new in pairs if old != new]


def _middle(values: Sequence[float]) -> float:
    """The geometric mean, which is what ratios of logarithms are of."""
    return float(np.exp(np.mean(np.log(values))))


def _build(
    before: str, after: str, verdict: str, changes: list[Change], method: str, tolerance: float, notes: list[str]
) -> Comparison:
    return Comparison(
        before=before,
        after=after,
        verdict=verdict,
        changes=changes,
        method=method,
        tolerance=tolerance,
        notes=notes,
    )
