"""The result of a benchmark as it is written to a file and read again: a stamp, what was asked, and each repeat.

Times of every request stay in it, in the order of their planned moments, so that a later comparison and the plots work
from what was seen and not from its summary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from loraplex.bench.errors import BenchError
from loraplex.bench.figure import Spread, spread
from loraplex_registry.peft.unreadable import UNREADABLE

FORMAT = "loraplex-bench/1"
TIMES = ("ttft", "itl", "gap", "request")
"""Time to first token; mean time of a later token, by usage; pause between two pieces of a stream; whole request."""


class ClientFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How the client itself fared: cores it used, how late its event loop and its requests were (p99, seconds)."""

    cpu_share: float
    lag_p99_s: float
    late_p99_s: float
    other_cores: float | None = None
    """Cores that all other processes of this machine used, the server among them if it runs here."""


class Repeat(msgspec.Struct, kw_only=True):
    """One run of the whole load against one server."""

    server: str
    number: int
    started_at: str
    seconds: float
    offered_rate: float | None
    """Requests a second that were to be sent; None of a closed load."""
    concurrency: int | None
    num_requests: int
    errors: dict[str, int]
    error_messages: dict[str, str]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_gaps: int
    goodput: float | None
    """Good requests a second, None without an SLO."""
    good_share: float | None
    samples: dict[str, list[float]]
    planned_s: list[float]
    """When each answered request was to be sent, from the start."""
    server_times: dict[str, Spread]
    """What the server's own metrics say of the same time: `queue`, `prefill`."""
    client: ClientFacts
    keeps_up: bool | None = None
    """Whether the server kept the offered rate; None of a closed load."""

    @property
    def num_ok(self) -> int:
        """Requests that were answered to the end."""
        return self.num_requests - sum(self.errors.values())

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of answered requests over the time of all."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_s(self) -> float:
        """Answered requests over the time of all."""
        return self.num_ok / self.seconds if self.seconds else 0.0

    @property
    def times(self) -> dict[str, Spread]:
        """Spreads of what the clients saw."""
        counts = {"gap": self.num_gaps}
        return {name: spread(self.samples.get(name, []), counts.get(name)) for name in TIMES}


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """Where, when, with which versions and flags it was taken; `servers` is what each said of itself."""

    taken_at: str
    versions: dict[str, str]
    machine: dict[str, Any]
    flags: dict[str, Any]
    servers: dict[str, dict[str, Any]]


class Step(msgspec.Struct, kw_only=True):
    """One load of a sweep; `level` is its rate or its concurrency."""

    level: float
    is_kept: bool
    why: str
    repeat: Repeat


class Sweep(msgspec.Struct, kw_only=True):
    """Loads of growing weight, and the heaviest that was kept; None where not even the first was."""

    by: str
    """`rate` or `concurrency`."""
    steps: list[Step]
    knee: float | None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of two results: after over before, with a confidence interval of that ratio."""

    name: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    verdict: str
    """`better`, `worse`, `same` or `unclear`."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two results, figure by figure; `method` says what was taken for independent."""

    before: str
    after: str
    verdict: str
    """`better`, `worse`, `mixed`, `same` or `unclear`."""
    changes: list[Change]
    method: str
    tolerance: float
    notes: list[str]


class Result(msgspec.Struct, kw_only=True):
    """Everything of one call of `loraplex bench`; `problems` are the reasons not to believe its figures."""

    format: str = FORMAT
    stamp: Stamp
    workload: dict[str, Any]
    slo: dict[str, float] = {}
    repeats: list[Repeat] = []
    sweep: Sweep | None = None
    comparison: Comparison | None = None
    problems: list[str] = []
    notes: list[str] = []

    @property
    def servers(self) -> list[str]:
        """Names of the servers, the one of `--url` first."""
        return list(dict.fromkeys(repeat.server for repeat in self.repeats))

    def of(self, server: str) -> list[Repeat]:
        """The repeats of one server."""
        return [repeat for repeat in self.repeats if repeat.server == server]


def pool(repeats: list[Repeat]) -> dict[str, Spread]:
    """Return spreads over the requests of all repeats, and the server's own where it told."""
    pooled = {}
    for name in TIMES:
        values = [value for repeat in repeats for value in repeat.samples.get(name, [])]
        pooled[name] = spread(values, sum(repeat.num_gaps for repeat in repeats) if name == "gap" else None)
    return pooled


def read_result(path: Path) -> Result:
    """Return a result from a file.

    Raises:
        BenchError: It cannot be read, or is no result of this program.
    """
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise BenchError(f"The result cannot be read: {error}", param="compare") from error
    except UNREADABLE as error:
        raise BenchError(f"{path} is no result of loraplex bench: {error}", param="compare") from error
    if result.format != FORMAT:
        raise BenchError(f"{path} has the format {result.format!r}; this program reads {FORMAT}.", param="compare")
    return result
