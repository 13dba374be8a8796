"""`loraplex bench` beside another generator: `python tests/bench/bench_against_load.py --other PATH`, 5 minutes.

Both ask one platform on loopback for the same: 64 greedy answers of 64 tokens from the base, 16 at once, prompts of 128
tokens; five pairs, in which the first of one is the second of the next. Two honest generators see the same server.

The other is a script that is run as `PATH --url URL --workload A --base NAME --out FILE`, takes its key from
LORAPLEX_API_KEY, and appends a line of JSON to the file: `n`, `errors`, `out_tok_s`, `prompt_tok_mean`, `ttft_ms` and
`itl_ms`, of which the first values are medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Report, build_parser, follow, parse_options
from setting import open_base

from loraplex.bench.client import Server
from loraplex.bench.length import Lengths
from loraplex.bench.load import Load
from loraplex.bench.result import Repeat
from loraplex.bench.run import Bench, prepare, take_repeat
from loraplex.bench.text import Text, read_vocabulary
from loraplex.bench.workload import Workload, build_requests
from platforms import LivePlatform, running_platform

_NUM_REQUESTS, _CONCURRENCY, _PROMPT_LEN, _MAX_TOKENS = 64, 16, 128, 64
_TOLERANCE = 0.05
_OTHER_S = 900
_MS = 1e3


@dataclass(frozen=True)
class Seen:
    """What one generator says of one run."""

    tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float
    prompt_len: float
    num_errors: int


_FIGURES = {"tokens/s": "tokens_per_s", "TTFT p50, ms": "ttft_p50_ms", "ITL p50, ms": "itl_p50_ms"}


class _OtherLine(msgspec.Struct):
    n: int
    errors: int
    out_tok_s: float
    ttft_ms: list[float | None]
    itl_ms: list[float | None]
    prompt_tok_mean: float | None = None
    err: str | None = None


class _Quiet:
    """Watches without a word: a bar that is drawn beside a measurement takes part in it."""

    def begin(self, label: str, total: int) -> None:
        """Say nothing."""

    def advance(self) -> None:
        """Say nothing."""


def main() -> int:
    """Measure and print; returns 1 where the two differ by more than 5 %."""
    parser = build_parser(__doc__)
    parser.add_argument("--other", type=Path, required=True, help="the other generator's script")
    parser.add_argument("--pairs", type=int, default=5)
    options = parse_options(parser)
    report = Report("against_load", options)
    with tempfile.TemporaryDirectory() as name:
        # a tiny base has no room for these prompts
        base = open_base(options.base, Path(name), is_tiny=False)
        # the other one sends the same prompts in each of its runs
        flags = ("--base", str(base), "--no-enable-prefix-caching")
        with running_platform(Path(name) / "data", *flags) as platform:
            pairs = _take_pairs(platform, read_vocabulary(base), options.other, 1 if options.quick else options.pairs)
    _print(report, pairs)
    return report.close()


def _take_pairs(platform: LivePlatform, words: Text, other: Path, num_pairs: int) -> list[tuple[Seen, Seen]]:
    with platform.management() as client:
        (model,) = (base.name for base in client.list_bases())
    workload = Workload((model,), Lengths(_PROMPT_LEN, _PROMPT_LEN), Lengths(_MAX_TOKENS, _MAX_TOKENS))
    server = Server(platform.url, platform.admin_key)
    bench = Bench({"": server}, workload, Load(concurrency=_CONCURRENCY), _NUM_REQUESTS)
    text = prepare(bench, words, _Quiet())
    pairs = []
    for number in follow(range(num_pairs), "pairs"):
        if number % 2 == 0:
            ours = _take_ours(bench, text, number)
            pairs.append((ours, _take_other(platform, model, other)))
        else:
            theirs = _take_other(platform, model, other)
            pairs.append((_take_ours(bench, text, number), theirs))
    return pairs


def _take_ours(bench: Bench, text: Text, number: int) -> Seen:
    requests = build_requests(bench.workload, text, bench.num_requests, bench.seed, number)
    repeat: Repeat = take_repeat(bench, bench.first, number, requests, bench.load, _Quiet(), "")
    times = repeat.times
    first_s, gap_s = times["ttft"].p50, times["gap"].p50
    assert first_s is not None, repeat.error_messages
    assert gap_s is not None, repeat.error_messages
    return Seen(
        tokens_per_s=repeat.tokens_per_s,
        ttft_p50_ms=_MS * first_s,
        itl_p50_ms=_MS * gap_s,
        prompt_len=repeat.prompt_tokens / repeat.num_ok,
        num_errors=sum(repeat.errors.values()),
    )


def _take_other(platform: LivePlatform, model: str, other: Path) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        asked = ["--url", platform.url, "--workload", "A", "--base", model, "--out", str(out)]
        environ = os.environ | {"LORAPLEX_API_KEY": platform.admin_key}
        ended = subprocess.run(
            [sys.executable, str(other), *asked],
            env=environ,
            capture_output=True,
            text=True,
            timeout=_OTHER_S,
            check=False,
        )
        if ended.returncode or not out.exists():
            sys.exit(f"{other} failed:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
        (line,) = (msgspec.json.decode(text, type=_OtherLine) for text in out.read_text().splitlines())
    if line.n != _NUM_REQUESTS:
        sys.exit(f"{other} sent {line.n} requests; its workload A is another one than this")
    first_ms, gap_ms = line.ttft_ms[0], line.itl_ms[0]
    if first_ms is None or gap_ms is None:
        sys.exit(f"{other}: {line.errors} of {line.n} requests failed: {line.err}")
    return Seen(line.out_tok_s, first_ms, gap_ms, line.prompt_tok_mean or 0.0, line.errors)


def _print(report: Report, pairs: Sequence[tuple[Seen, Seen]]) -> None:
    who = ("loraplex bench", "other")
    rows = [
        [f"{number}, {name}", *(getattr(seen, field) for field in _FIGURES.values()), seen.prompt_len, seen.num_errors]
        for number, pair in enumerate(pairs, start=1)
        for name, seen in zip(who, pair, strict=True)
    ]
    report.table(["pair", *_FIGURES, "prompt", "errors"], rows)
    summary = []
    for figure, field in _FIGURES.items():
        ours, theirs = ([getattr(pair[side], field) for pair in pairs] for side in (0, 1))
        ratio = statistics.median(one / two for one, two in zip(ours, theirs, strict=True))
        summary.append([figure, statistics.median(ours), statistics.median(theirs), f"{100 * (ratio - 1):+.1f} %"])
        report.check(f"{figure}, the two apart", abs(ratio - 1), at_most=_TOLERANCE)
    report.table(["medians", *who, "difference"], summary)
    report.check("errors", sum(seen.num_errors for pair in pairs for seen in pair), at_most=0)


if __name__ == "__main__":
    sys.exit(main())
