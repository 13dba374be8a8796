"""The result as one HTML page that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from loraplex.bench.result import Repeat, Result
from loraplex.bench.svg import Bar, Series, draw_bars, draw_dots, draw_lines
from loraplex.bench.table import NAMES, build_tables, describe_verdict

_CURVE = np.linspace(0, 1, 201)
_MAX_DOTS = 1500
_VERDICT_TO_COLOUR = {"same": 0, "unclear": 3, "worse": 1, "better": 2}


def render_page(result: Result, baseline: Result | None = None) -> str:
    """Return the page; a baseline's curves are drawn dashed."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    stamp = result.stamp
    return environment.get_template("page.html").render(
        title="Benchmark of " + " and ".join(stamp.servers),
        summary=f"Taken {stamp.taken_at} with loraplex {stamp.versions['loraplex']} on {stamp.machine['cpu']}, "
        f"{stamp.machine['cores']} cores",
        problems=result.problems,
        notes=[*result.notes, *(result.comparison.notes if result.comparison else ())],
        verdict=describe_verdict(result.comparison) if result.comparison else "",
        tables=build_tables(result),
        plots=[Markup(plot) for plot in _draw(result, baseline)],  # noqa: S704 - names in it are escaped where drawn
        stamps=[
            ("What was asked", _list(result.workload | {"slo": result.slo or None})),
            ("Flags", _list(stamp.flags)),
            ("Machine and versions", _list(stamp.machine | stamp.versions)),
            *((f"Server {name}", _list(facts)) for name, facts in stamp.servers.items()),
            ("Client", [(f"{run.server}, repeat {run.number + 1}", _show(run.client)) for run in result.repeats]),
        ],
    )


def _draw(result: Result, baseline: Result | None) -> list[str]:
    plots = []
    if result.comparison:
        bars = [
            Bar(f"{one.name}: {one.verdict}", one.low, one.ratio, one.high, _VERDICT_TO_COLOUR[one.verdict])
            for one in result.comparison.changes
        ]
        label = f"{result.comparison.after} over {result.comparison.before}"
        plots.append(draw_bars("What changed, with intervals", label, bars, 1.0, result.comparison.tolerance))
    if result.sweep:
        plots += _draw_sweep(result)
    if result.repeats:
        for name in ("ttft", "itl", "gap", "request"):
            curves = [_curve(server, result.of(server), name, colour) for colour, server in enumerate(result.servers)]
            if baseline is not None:
                curves.append(_curve("baseline", baseline.of(baseline.servers[0]), name, 1, is_dashed=True))
            plots.append(
                draw_lines(NAMES[name].capitalize(), "ms", "share of all, %", [one for one in curves if one.points])
            )
        dots = [_dots(server, result.of(server), colour) for colour, server in enumerate(result.servers)]
        plots.append(draw_dots("First token, by planned moment, all repeats", "s from the start", "ms", dots))
        plots.append(_draw_throughput(result))
    return plots


def _draw_sweep(result: Result) -> list[str]:
    assert result.sweep is not None
    steps, unit = result.sweep.steps, "requests/s" if result.sweep.by == "rate" else "requests at once"
    mark = {"mark_x": result.sweep.knee, "mark": "knee"} if result.sweep.knee else {}
    tokens = Series("tokens/s", [(step.level, step.repeat.tokens_per_s) for step in steps])
    curves = []
    for colour, (name, percent) in enumerate([("ttft", 50), ("ttft", 95), ("request", 50)]):
        values = [(step.level, step.repeat.samples.get(name, [])) for step in steps]
        points = [(level, float(np.percentile(found, percent)) * 1e3) for level, found in values if found]
        curves.append(Series(f"{NAMES[name]} p{percent}", points, colour))
    return [
        draw_lines("Output over load", unit, "tokens/s", [tokens], **mark),  # type: ignore[arg-type]
        draw_lines("Times over load", unit, "ms", curves, **mark),  # type: ignore[arg-type]
    ]


def _draw_throughput(result: Result) -> str:
    lines = [
        Series(server, [(run.number + 1, run.tokens_per_s) for run in result.of(server)], colour)
        for colour, server in enumerate(result.servers)
    ]
    return draw_lines("Output of each repeat", "repeat", "tokens/s", lines)


def _curve(name: str, runs: Sequence[Repeat], time: str, colour: int, *, is_dashed: bool = False) -> Series:
    values = [value for run in runs for value in run.samples.get(time, [])]
    points = (
        [(float(x) * 1e3, float(y) * 100) for x, y in zip(np.quantile(values, _CURVE), _CURVE, strict=True)]
        if values
        else []
    )
    return Series(name, points, colour, is_dashed)


def _dots(name: str, runs: Sequence[Repeat], colour: int) -> Series:
    points = [
        (moment, value * 1e3) for run in runs for moment, value in zip(run.planned_s, run.samples["ttft"], strict=True)
    ]
    return Series(name, points[:: max(1, len(points) // _MAX_DOTS)], colour)


def _list(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, _show(value)) for name, value in facts.items() if value is not None]


def _show(value: Any) -> str:
    if isinstance(value, str):
        return value
    built = msgspec.to_builtins(value)
    if isinstance(built, dict):
        built = {name: round(one, 4) if isinstance(one, float) else one for name, one in built.items()}
    return msgspec.json.encode(built).decode()
