"""The figures of a result as tables and sentences, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.bench.figure import PERCENTS, Spread
from loraplex.bench.interval import find_halfwidth
from loraplex.bench.result import TIMES, Change, Comparison, Repeat, Result, Sweep, pool

NAMES = {
    "ttft": "first token",
    "itl": "later tokens, mean of each request",
    "gap": "between pieces of a stream",
    "request": "request",
    "queue": "queue, by the server",
    "prefill": "prefill, by the server",
}
_CONFIDENCE = 0.95
_MARKS = {"worse": "worse", "better": "better", "same": "same", "unclear": "unclear"}


@dataclass(frozen=True)
class Table:
    """Text in rows; the first column names them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def build_tables(result: Result) -> list[Table]:
    """Return all tables of a result."""
    tables = []
    if result.repeats:
        tables.append(_build_totals(result))
        tables += [_build_times(result, server) for server in result.servers]
    if result.sweep:
        tables.append(_build_steps(result.sweep))
    runs = (
        [*result.repeats, *(step.repeat for step in result.sweep.steps if result.sweep)]
        if result.sweep
        else result.repeats
    )
    if any(run.errors for run in runs):
        tables.append(_build_errors(runs))
    if result.comparison:
        tables.append(_build_changes(result.comparison))
    return tables


def describe_verdict(comparison: Comparison) -> str:
    """Return in one sentence what a comparison found."""
    told = {verdict: [change for change in comparison.changes if change.verdict == verdict] for verdict in _MARKS}
    worse, better = ("; ".join(map(_describe, told[verdict])) for verdict in ("worse", "better"))
    match comparison.verdict:
        case "worse":
            return f"Worse than {comparison.before}: {worse}."
        case "better":
            return f"Better than {comparison.before}: {better}."
        case "mixed":
            return f"Mixed against {comparison.before}: worse {worse}; better {better}."
        case "same":
            return f"The same as {comparison.before}, within {comparison.tolerance:.0%}."
    reach = max((max(change.high, 1 / change.low) - 1 for change in comparison.changes), default=0.0)
    if comparison.notes:
        return f"No verdict against {comparison.before}."
    if reach >= 1:
        return f"No change from {comparison.before} could be seen: the runs differ too much among themselves."
    return (
        f"No change from {comparison.before} was found, but one of up to {reach:.0%} could hide; more --repeats would "
        "show it."
    )


def describe_knee(sweep: Sweep) -> str:
    """Return in one sentence where the knee is."""
    if sweep.knee is None:
        return f"No knee: not even the first {sweep.by} was kept."
    (step,) = (step for step in sweep.steps if step.level == sweep.knee)
    unit = "requests/s" if sweep.by == "rate" else "at once"
    first = step.repeat.times["ttft"].p50
    told = f", first token p50 {show_ms(first)} ms" if first is not None else ""
    return f"Knee: {sweep.knee:.3g} {unit}, {step.repeat.tokens_per_s:.0f} tokens/s{told}."


def show_ms(seconds: float | None) -> str:
    """Return milliseconds with three digits that count; a dash of what is not known."""
    if seconds is None:
        return "-"
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _build_totals(result: Result) -> Table:
    has_slo = any(repeat.goodput is not None for repeat in result.repeats)
    columns = ["server", "requests", "failed", "tokens/s", "requests/s", "prompt", "cached", "output", "seconds"]
    columns += ["goodput/s", "good"] if has_slo else []
    rows = []
    for server in result.servers:
        runs = result.of(server)
        num, num_ok = sum(run.num_requests for run in runs), sum(run.num_ok for run in runs)
        seconds = sum(run.seconds for run in runs)
        row = [
            server.split("://")[-1],
            f"{num:,}",
            f"{num - num_ok:,}",
            _with_halfwidth([run.tokens_per_s for run in runs]),
        ]
        row.append(_with_halfwidth([run.requests_per_s for run in runs], digits=2))
        row += [_mean_of(runs, name) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")]
        row.append(f"{seconds:.1f}")
        if has_slo:
            row.append(_with_halfwidth([run.goodput or 0.0 for run in runs], digits=2))
            row.append(f"{sum((run.good_share or 0) * run.num_requests for run in runs) / num:.1%}")
        rows.append(row)
    num = len(result.of(result.servers[0]))
    caption = (
        f"{num} repeats; ± is how far off the mean of so many may be, with 95 % confidence; tokens are a request's "
        "mean, by the server's usage"
    )
    return Table("Load", columns, rows, caption)


def _build_times(result: Result, server: str) -> Table:
    runs = result.of(server)
    rows = [[NAMES[name], *_show_spread(found)] for name, found in pool(runs).items() if found.num]
    for name in ("queue", "prefill"):
        # histograms of several stretches cannot be put together from their quantiles
        spreads = [run.server_times[name] for run in runs if name in run.server_times]
        if spreads:
            middle = sorted(spreads, key=lambda one: one.p50 or 0.0)[len(spreads) // 2]
            rows.append([f"{NAMES[name]}, middle repeat", *_show_spread(middle)])
    title = "Times, ms" if len(result.servers) == 1 else f"Times of {server}, ms"
    from_ = "planned arrival" if runs[0].concurrency is None else "sending"
    return Table(
        title,
        ["from what the clients saw", "values", "mean", *_percents()],
        rows,
        f"from the {from_}; a dash where there are too few values",
    )


def _build_steps(sweep: Sweep) -> Table:
    unit = "requests/s" if sweep.by == "rate" else "at once"
    rows = []
    for step in sweep.steps:
        run = step.repeat
        times = run.times
        first, later = times["ttft"], times["itl"]
        good = "-" if run.good_share is None else f"{run.good_share:.0%}"
        rows.append(
            [f"{step.level:.3g}", f"{run.requests_per_s:.3g}", f"{run.tokens_per_s:.0f}", good]
            + [show_ms(value) for value in (first.p50, first.p95, later.p50, later.p95)]
            + ["yes" if step.is_kept else f"no: {step.why}"]
        )
    columns = [unit, "done/s", "tokens/s", "good", "first p50", "first p95", "later p50", "later p95", "kept"]
    return Table("Sweep, ms", columns, rows, describe_knee(sweep))


def _build_errors(runs: Sequence[Repeat]) -> Table:
    counts: dict[str, int] = {}
    messages: dict[str, str] = {}
    for run in runs:
        for code, count in run.errors.items():
            counts[code] = counts.get(code, 0) + count
        messages = run.error_messages | messages
    return Table(
        "Errors",
        ["code", "requests", "for example"],
        [[code, str(num), messages[code]] for code, num in counts.items()],
    )


def _build_changes(comparison: Comparison) -> Table:
    rows = [
        [
            change.name,
            _show_figure(change, change.before),
            _show_figure(change, change.after),
            f"{change.ratio - 1:+.1%}",
            f"{change.low - 1:+.1%} to {change.high - 1:+.1%}",
            _MARKS[change.verdict],
        ]
        for change in comparison.changes
    ]
    columns = ["figure (times in ms)", comparison.before, comparison.after, "change", "95 % interval of all", "verdict"]
    return Table("Comparison", columns, rows, f"{comparison.method}; tolerance {comparison.tolerance:.0%}")


def _show_figure(change: Change, value: float) -> str:
    return f"{value:.4g}" if "/s" in change.name or change.name == "goodput" else show_ms(value)


def _describe(change: Change) -> str:
    return f"{change.name} {change.ratio - 1:+.1%} ({change.low - 1:+.1%} to {change.high - 1:+.1%})"


def _show_spread(found: Spread) -> list[str]:
    return [f"{found.num:,}", show_ms(found.mean), *(show_ms(found.at(percent)) for percent in PERCENTS)]


def _percents() -> list[str]:
    return [f"p{percent}" for percent in PERCENTS]


def _mean_of(runs: Sequence[Repeat], name: str) -> str:
    num = sum(run.num_ok for run in runs)
    return f"{sum(getattr(run, name) for run in runs) / num:.1f}" if num else "-"


def _with_halfwidth(values: Sequence[float], digits: int = 0) -> str:
    mean, reach = sum(values) / len(values), find_halfwidth(values, _CONFIDENCE)
    return f"{mean:,.{digits}f}" + ("" if reach is None else f" ± {reach:.1%}")


__all__ = ["NAMES", "TIMES", "Table", "build_tables", "describe_knee", "describe_verdict", "show_ms"]
