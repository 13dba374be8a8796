"""How a benchmark speaks: whether the machine is quiet, how far it is, tables, which targets are met, one line of JSON.

Knows numbers and text, nothing of the engine. Progress is drawn by whoever measures, between two measurements, never by
a thread beside them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_BAR_COLUMNS = 30
_QUIET_LOAD, _QUIET_CORES = 0.5, 0.1


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test on a tiny base; its numbers mean nothing")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON that holds every figure")
    parser.add_argument("--base", default="smollm2-135m", help="what to pull and measure on")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=0, help="of the step loop; 0 = all cores")
    return parser


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line's options; a quick run takes one thread, so that it works beside others."""
    options = parser.parse_args()
    options.threads = options.threads or int(options.quick)
    return options


class Report:
    """Collects figures and verdicts while it prints them."""

    def __init__(self, title: str, options: argparse.Namespace) -> None:
        self._options = options
        self.figures: dict[str, Any] = {"bench": title, "options": vars(options)}
        self._checks: list[dict[str, Any]] = []
        if options.quick:
            print("QUICK: a smoke test; no number below says anything about speed.")
        self._say_load("before")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print aligned columns and keep them as figures; the first column's header names the table."""
        self.figures[header[0]] = [dict(zip(header, row, strict=True)) for row in rows]
        cells = [list(header), *([_show(cell) for cell in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        print()
        for first, *others in cells:
            texts = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            print("  " + "  ".join([first.ljust(widths[0]), *texts]))

    def say(self, name: str, value: Any, text: str) -> None:
        """Print one figure in words."""
        self.figures[name] = value
        print(text)

    def check(self, name: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
        """Hold a figure against its target."""
        assert (at_most is None) != (at_least is None)
        is_met = value <= at_most if at_most is not None else value >= (at_least or 0.0)
        limit = f"at most {at_most:.4g}" if at_most is not None else f"at least {at_least:.4g}"
        self._checks.append({"name": name, "value": value, "limit": limit, "met": is_met})

    def close(self) -> int:
        """Print the verdicts and the JSON; returns the exit code, 1 where a target is missed."""
        self._say_load("after")
        print("\ntargets")
        for check in self._checks:
            verdict = "-   " if self._options.quick else "pass" if check["met"] else "FAIL"
            print(f"  {verdict}  {check['name']}: {check['value']:.4g}, {check['limit']}")
        if self._options.json:
            print(msgspec.json.encode({**self.figures, "targets": self._checks}).decode())
        return int(not self._options.quick and not all(check["met"] for check in self._checks))

    def _say_load(self, when: str) -> None:
        load, cores = os.getloadavg()[0], busy_cores()
        self.figures[f"load_{when}"] = {"load_average": load, "busy_cores": cores}
        # the run itself is in the load average that is read after it
        is_quiet = cores < _QUIET_CORES and (when == "after" or load < _QUIET_LOAD)
        note = "" if is_quiet else "  NOT QUIET: other processes take part in these numbers"
        print(f"{when}: load average {load:.2f}, other processes use {cores:.2f} of {os.cpu_count()} cores{note}")


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that the whole machine uses while this process sleeps."""
    began = _busy_ticks()
    time.sleep(seconds)
    return (_busy_ticks() - began) / os.sysconf("SC_CLK_TCK") / seconds


class Progress:
    """A bar on standard error; four lines where that is no terminal."""

    def __init__(self, label: str, total: float) -> None:
        self._label = label
        self._total = max(total, 1e-9)
        self._drawn_at = 0.0
        self._quarter = 0

    def update(self, done: float) -> None:
        """Draw, at most twice a second."""
        share = min(1.0, done / self._total)
        if sys.stderr.isatty():
            if share < 1 and time.monotonic() - self._drawn_at < 0.5:
                return
            self._drawn_at = time.monotonic()
            filled = round(share * _BAR_COLUMNS)
            end = "\n" if share == 1 else ""
            bar = "#" * filled + "." * (_BAR_COLUMNS - filled)
            print(f"\r{self._label} [{bar}] {share:4.0%}", end=end, file=sys.stderr, flush=True)
        elif int(share * 4) > self._quarter:
            self._quarter = int(share * 4)
            print(f"{self._label} {share:.0%}", file=sys.stderr, flush=True)


def follow(items: Iterable[T], label: str) -> Iterator[T]:
    """Yield the items under a progress bar."""
    todo = list(items)
    progress = Progress(label, len(todo))
    for index, item in enumerate(todo):
        yield item
        progress.update(index + 1)


def percentile(values: Iterable[float], percent: float) -> float:
    """Linear between the two nearest ranks; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _busy_ticks() -> int:
    ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    # user nice system idle iowait irq softirq
    return sum(ticks[:3]) + sum(ticks[5:7])


def _show(cell: object) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
