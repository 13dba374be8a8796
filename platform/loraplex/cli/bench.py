"""`loraplex bench`: load against any server with OpenAI's API; tables, JSON, a page, a verdict against another run."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from loraplex.bench.client import Server, read_server
from loraplex.bench.compare import check_same_question, compare_results, compare_servers
from loraplex.bench.errors import BenchError
from loraplex.bench.page import render_page
from loraplex.bench.result import Result, read_result
from loraplex.bench.run import Bench, describe_question, take_bench
from loraplex.bench.slo import read_slo
from loraplex.bench.sweep import take_sweep
from loraplex.bench.table import build_tables, describe_verdict
from loraplex.cli.bench_flag import LoadFlags, ResultFlags, WorkloadFlags
from loraplex.cli.output import AsJson, fail, print_json, print_table, progress_bar, say
from loraplex.client.location import find_location

_OPENAI_KEY = "OPENAI_API_KEY"
_REDRAW_S = 0.5
_LOAD, _RESULT = LoadFlags(), ResultFlags()


class BenchBar:
    """A bar that follows one stretch of requests after another."""

    def __init__(self) -> None:
        self._progress = progress_bar(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        # drawn where requests end: a thread beside them would delay them
        self._progress.live.auto_refresh = False
        self._drawn_at = 0.0
        self._task = self._progress.add_task("probe", total=None)

    def __enter__(self) -> BenchBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, label: str, total: int) -> None:
        """Show another stretch."""
        self._progress.reset(self._task, description=label, total=total)
        self._progress.refresh()

    def advance(self) -> None:
        """Count a request, and show it twice a second."""
        self._progress.advance(self._task)
        if time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._drawn_at = time.monotonic()
            self._progress.refresh()


def bench(
    *,
    url: str | None = None,
    against: str | None = None,
    against_key_file: Path | None = None,
    workload: WorkloadFlags,
    load: LoadFlags = _LOAD,
    result: ResultFlags = _RESULT,
    as_json: AsJson = False,
) -> int:
    """Measure a server as its clients see it; the exit code is 1 if the figures are refused or worse than a baseline.

    The key is LORAPLEX_API_KEY, else OPENAI_API_KEY.

    Args:
        url: Any server with OpenAI's API; default LORAPLEX_URL, else the platform on this machine.
        against: A second server, asked the same in turn and compared with the first by pairs.
        against_key_file: File with the key of that one; default the first one's key.
        workload: What requests are like.
        load: How they are sent.
        result: What is made of it.
        as_json: Print the whole result as JSON.
    """
    asked = _build_bench(_find_servers(url, against, against_key_file), workload, load, result)
    baseline = read_result(result.compare) if result.compare else None
    _check(asked, baseline, load)
    say(describe_size(asked, is_sweep=load.sweep))
    with BenchBar() as bar:
        take = take_sweep if load.sweep else take_bench
        found = take(asked, workload.build_text(), bar)
    if against is not None:
        found.comparison = compare_servers(found, result.tolerance)
    elif baseline is not None:
        found.comparison = compare_results(baseline, found, result.tolerance)
    _write(found, result, baseline)
    if as_json:
        print_json(found)
    else:
        _print(found)
    return int(
        bool(found.problems) or (found.comparison is not None and found.comparison.verdict in ("worse", "mixed"))
    )


def describe_size(asked: Bench, *, is_sweep: bool) -> str:
    """Return how many requests are about to be sent."""
    num, warmup = asked.num_requests, asked.num_warmup
    before = f", after {warmup} to warm up" if warmup else ""
    each = " to each of the two servers" if len(asked.servers) > 1 else ""
    if is_sweep:
        more = " or more" if asked.load.rate is None else ""
        return f"Each step of the sweep sends {num} requests{more} (--requests){before}; it finds out how many steps."
    total = asked.num_repeats * num * len(asked.servers)
    sent = f"{asked.num_repeats} repeats (--repeats) of {num} requests (--requests) are sent{each}"
    return f"{sent}, {total:,} in all{before}."


def _build_bench(servers: dict[str, Server], workload: WorkloadFlags, load: LoadFlags, result: ResultFlags) -> Bench:
    asked = workload.build_workload(load.speed)
    sent = load.build_load(has_trace=bool(asked.trace))
    return Bench(
        servers=servers,
        workload=asked,
        load=sent,
        num_requests=load.count_requests(sent, len(asked.trace)),
        num_repeats=load.repeats,
        num_warmup=load.warmup,
        seed=workload.seed,
        slo=read_slo(result.slo) if result.slo else {},
        metrics_url=result.metrics_url,
        flags=_stamp_flags(workload, load, result),
    )


def _check(asked: Bench, baseline: Result | None, load: LoadFlags) -> None:
    """Refuse at once what could only be refused after the run."""
    if len(asked.servers) > 1 and (load.sweep or baseline is not None):
        raise BenchError("--against goes with neither --sweep nor --compare.", param="against")
    if baseline is not None:
        if load.sweep:
            raise BenchError("A sweep is not compared; take one --rate or --concurrency.", param="compare")
        check_same_question(baseline, describe_question(asked))


def _find_servers(url: str | None, against: str | None, against_key_file: Path | None) -> dict[str, Server]:
    location = find_location(os.environ)
    told = os.environ.get(_OPENAI_KEY, "")
    # the key of the platform on this machine goes nowhere else
    is_there = url is None or url.rstrip("/").removesuffix("/v1") == location.url
    own = (
        location.key
        if is_there or os.environ.get("LORAPLEX_API_KEY") or os.environ.get("LORAPLEX_API_KEY_FILE")
        else None
    )
    first = read_server(url or location.url, own or told)
    if against is None:
        return {first.url: first}
    try:
        key = against_key_file.read_text(encoding="utf-8").strip() if against_key_file else first.key
    except OSError as error:
        raise BenchError(f"The key cannot be read: {error}", param="against_key_file") from error
    second = read_server(against, key)
    if second.url == first.url:
        raise BenchError(f"--against names the same server as --url, {first.url}.", param="against")
    return {first.url: first, second.url: second}


def _stamp_flags(*flags: WorkloadFlags | LoadFlags | ResultFlags) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for group in flags
        for name, value in asdict(group).items()
        if value is not None
    }


def _write(found: Result, flags: ResultFlags, baseline: Result | None) -> None:
    try:
        if flags.save:
            flags.save.write_bytes(msgspec.json.encode(found))
        if flags.html:
            flags.html.write_text(render_page(found, baseline), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"The result cannot be written: {error}", param="save") from error


def _print(found: Result) -> None:
    for table in build_tables(found):
        print_table(f"\n{table.title}", table.columns, table.rows, empty="Nothing was answered.")
        if table.caption:
            say(table.caption)
    for note in [*found.notes, *(found.comparison.notes if found.comparison else ())]:
        say(note)
    if found.comparison:
        say(describe_verdict(found.comparison))
    for problem in found.problems:
        fail(problem, code="bench_refused")
