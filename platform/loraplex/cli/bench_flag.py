"""The flags of `loraplex bench`: what is asked, how it is sent, what is made of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Group, Parameter

from loraplex.bench.compare import TOLERANCE
from loraplex.bench.errors import BenchError
from loraplex.bench.length import read_lengths
from loraplex.bench.load import Load
from loraplex.bench.popularity import build_chooser
from loraplex.bench.text import Text, read_vocabulary
from loraplex.bench.trace import TraceRow, read_trace
from loraplex.bench.workload import Workload

_ASKED, _SENT, _MADE = (Group(name, sort_key=10 + place) for place, name in enumerate(("Requests", "Load", "Result")))
_DEFAULT_CONCURRENCY, _DEFAULT_REQUESTS = 16, 100


def _flag(text: str, group: Group) -> Parameter:
    return Parameter(help=text, group=group, negative=())


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorkloadFlags:
    """What requests are like."""

    model: Annotated[list[str], Parameter(help="Model to ask for; once for each adapter.", group=_ASKED, negative=())]
    popularity: Annotated[
        str, _flag("Which of them: identical, uniform (default), skewed, distinct, zipf:1.5.", _ASKED)
    ] = "uniform"
    prompt: Annotated[
        str, _flag("Tokens of a prompt: 128 (default), uniform:64-256, lognormal:MEDIAN,SIGMA,MAX.", _ASKED)
    ] = "128"
    output: Annotated[str, _flag("Tokens of an answer, likewise; default 64.", _ASKED)] = "64"
    trace: Annotated[
        Path | None, _flag("JSON lines of timestamp, prompt_tokens, max_tokens, or prompt, model.", _ASKED)
    ] = None
    prefix: Annotated[int, _flag("Tokens that prompts share at their beginning, more than --prompt.", _ASKED)] = 0
    prefix_share: Annotated[float, _flag("Share of requests that begin so, 0 to 1; default 1.", _ASKED)] = 1.0
    prefixes: Annotated[int, _flag("How many different such beginnings; default 1.", _ASKED)] = 1
    same_prefix: Annotated[bool, _flag("The same in all repeats; else new in each.", _ASKED)] = False
    tokenizer: Annotated[Path | None, _flag("The model's tokenizer.json: prompts of exact length.", _ASKED)] = None
    chat: Annotated[bool, _flag("Ask /v1/chat/completions; else /v1/completions.", _ASKED)] = False
    no_ignore_eos: Annotated[bool, _flag("Let answers end by themselves.", _ASKED)] = False
    extra: Annotated[str, _flag("More fields of each body, a JSON object.", _ASKED)] = "{}"
    seed: Annotated[int, _flag("Decides all that is drawn; default 0.", _ASKED)] = 0

    def build_workload(self, speed: float) -> Workload:
        """Return the workload.

        Raises:
            BenchError: A flag has no meaning.
        """
        if self.prefix < 0 or self.prefixes < 1 or not 0 <= self.prefix_share <= 1:
            raise BenchError("--prefix is 0 or more, --prefixes 1 or more, --prefix-share 0 to 1.", param="prefix")
        workload = Workload(
            models=tuple(self.model),
            prompt=read_lengths(self.prompt, "prompt"),
            output=read_lengths(self.output, "output"),
            popularity=self.popularity,
            prefix_len=self.prefix,
            prefix_share=self.prefix_share,
            num_prefixes=self.prefixes,
            has_same_prefix=self.same_prefix,
            is_chat=self.chat,
            ignores_eos=not self.no_ignore_eos,
            extra=self._read_extra(),
            trace=self._read_trace(speed),
        )
        build_chooser(self.popularity, workload.models, random.Random(0))  # noqa: S311 - only to refuse a wrong name
        return workload

    def build_text(self) -> Text:
        """Return what writes prompts."""
        return read_vocabulary(self.tokenizer) if self.tokenizer else Text()

    def _read_extra(self) -> dict[str, Any]:
        try:
            return msgspec.json.decode(self.extra, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise BenchError(f"--extra is no JSON object: {error}", param="extra") from error

    def _read_trace(self, speed: float) -> tuple[TraceRow, ...]:
        if self.trace is None:
            return ()
        rows = read_trace(self.trace)
        return tuple(msgspec.structs.replace(row, timestamp=row.timestamp / speed) for row in rows)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """How requests are sent."""

    rate: Annotated[
        float | None, _flag("Requests a second, by a Poisson process that waits for no answer (open loop).", _SENT)
    ] = None
    concurrency: Annotated[
        int | None, _flag("Requests open at once (closed loop); default 16 without --rate and --trace.", _SENT)
    ] = None
    speed: Annotated[float, _flag("How much faster than it says a trace is sent; default 1.", _SENT)] = 1.0
    requests: Annotated[
        int | None, _flag("Requests of a repeat; default 100, or six rounds of --concurrency, or the trace.", _SENT)
    ] = None
    repeats: Annotated[int, _flag("Runs of all that, with other prompts; default 5.", _SENT)] = 5
    warmup: Annotated[int, _flag("Requests before that; default 16, and each model once.", _SENT)] = 16
    sweep: Annotated[bool, _flag("Heavier and heavier load, from --rate or --concurrency up to the knee.", _SENT)] = (
        False
    )
    timeout: Annotated[float, _flag("Longest wait for one answer, seconds; default 600.", _SENT)] = 600.0

    def build_load(self, *, has_trace: bool) -> Load:
        """Return the load.

        Raises:
            BenchError: A flag has no meaning.
        """
        if self.rate is not None and self.concurrency is not None:
            raise BenchError("Give --rate (open loop) or --concurrency (closed loop), not both.", param="rate")
        numbers = (self.rate, self.concurrency, self.requests, self.repeats, self.timeout, self.speed)
        if any(number is not None and not 0 < number < float("inf") for number in numbers) or self.warmup < 0:
            raise BenchError(
                "--rate, --concurrency, --requests, --repeats, --timeout and --speed are above 0.", param="rate"
            )
        concurrency = self.concurrency
        if self.rate is None and concurrency is None and not has_trace:
            concurrency = 1 if self.sweep else _DEFAULT_CONCURRENCY
        if self.sweep and self.rate is None and concurrency is None:
            raise BenchError("A sweep of a trace needs --rate or --concurrency to begin with.", param="sweep")
        return Load(self.rate, concurrency, self.timeout)

    def count_requests(self, load: Load, num_in_trace: int) -> int:
        """Return how many requests a repeat has."""
        wanted = self.requests or num_in_trace or max(_DEFAULT_REQUESTS, 6 * (load.concurrency or 0))
        return min(wanted, num_in_trace or wanted)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ResultFlags:
    """What is made of it."""

    slo: Annotated[
        str | None, _flag("Bounds of a good request, seconds: ttft=0.5,itl=0.05,gap=1,request=20.", _MADE)
    ] = None
    save: Annotated[Path | None, _flag("Write the whole result to this file, as --compare reads it.", _MADE)] = None
    html: Annotated[Path | None, _flag("Write a page with plots to this file.", _MADE)] = None
    compare: Annotated[
        Path | None, _flag("Compare with the result in this file; ends with 1 if this one is worse.", _MADE)
    ] = None
    tolerance: Annotated[float, _flag("Share by which a figure may differ; default 0.03.", _MADE)] = TOLERANCE
    metrics_url: Annotated[str | None, _flag("Where the server's metrics are; default /metrics of --url.", _MADE)] = (
        None
    )
