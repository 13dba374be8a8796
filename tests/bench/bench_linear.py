"""The base linears of a whole step, ours beside oneDNN's: `python tests/bench/bench_linear.py [--quick]`, a minute.

Every linear of every layer and the head once, at the shapes of a base and each with a weight of its own, so that the
weights come from memory as they do in a step. The forms take turns within each round; printed are medians, the
operations and the bytes of the weights over them, and the median of the ratios within a round. One thread is timed by
its own clock, so that others on the machine disturb it less.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Report, build_parser, follow, parse_options
from setting import open_base

from loraplex_engine.core.module_group import HEAD_GROUP, LAYER_GROUPS
from loraplex_engine.models.config import ModelConfig, load_config
from loraplex_engine.models.decoder import lora_shapes
from loraplex_engine.ops.linear import ONEDNN, LinearForm, PackedLinear, fastest_form

_NUM_ROWS = (1, 4, 8, 16, 32, 52, 64, 128, 512)
_MOST_TIME = 1.05
"""The share of oneDNN's time that ours may take: as long, but for the noise."""


class Linears:
    """All linears of one step in one form, with random weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, form: LinearForm) -> None:
        shapes = lora_shapes(config)
        groups = [*list(LAYER_GROUPS) * config.num_layers, HEAD_GROUP]
        self.sizes = [(shapes[group].in_features, sum(shapes[group].out_features)) for group in groups]
        self.dtype = dtype
        self._linears = [PackedLinear(torch.randn(o, k).to(dtype) / k**0.5, form=form) for k, o in self.sizes]

    @property
    def num_weights(self) -> int:
        """Entries of all weights, each read once in a step."""
        return sum(k * o for k, o in self.sizes)

    def run_ms(self, num_rows: int) -> float:
        """Milliseconds of all products with so many rows."""
        widths = {k for k, _ in self.sizes}
        inputs = {k: torch.randn(num_rows, k).to(self.dtype) for k in widths}
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        started_at = clock()
        for linear in self._linears:
            linear(inputs[linear.in_features])
        return 1e3 * (clock() - started_at)


def measure(
    forms: Sequence[Linears], num_rows: Sequence[int], rounds: int, label: str
) -> dict[int, list[tuple[float, ...]]]:
    """Milliseconds of each form in each round, by the number of rows."""
    times: dict[int, list[tuple[float, ...]]] = {rows: [] for rows in num_rows}
    for index in follow(range(rounds + 1), label):
        for rows in num_rows:
            order = list(enumerate(forms))[:: 1 if index % 2 else -1]
            taken = {place: linears.run_ms(rows) for place, linears in order}
            # the first round warms up
            times[rows] += [tuple(taken[place] for place in range(len(forms)))] if index else []
    return times


def compare(report: Report, config: ModelConfig, dtype: torch.dtype, rounds: int) -> None:
    """Print and judge one dtype."""
    name, fastest = str(dtype).removeprefix("torch."), fastest_form("cpu", dtype)
    forms = [Linears(config, dtype, form) for form in (fastest, ONEDNN)]
    rows = []
    for num_rows, pairs in measure(forms, _NUM_ROWS, rounds, name).items():
        ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        operations, num_bytes = 2 * num_rows * forms[0].num_weights, dtype.itemsize * forms[0].num_weights
        speeds = [operations / ours / 1e6, operations / theirs / 1e6, num_bytes / ours / 1e6, num_bytes / theirs / 1e6]
        rows.append([num_rows, ours, theirs, ratio, *(round(speed) for speed in speeds)])
        report.check(f"{name}, {num_rows} rows: time over oneDNN's", ratio, at_most=_MOST_TIME)
    header = [f"rows, {name}", f"{fastest.name} ms", "onednn ms", "ratio"]
    report.table(
        [*header, *(f"{form} {unit}" for unit in ("GFLOP/s", "GB/s") for form in (fastest.name, "onednn"))], rows
    )


def main() -> int:
    """Measure, print, and say which targets are met."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="how often every case is measured")
    options = parse_options(parser)
    if options.threads:
        torch.set_num_threads(options.threads)
    dtypes = ["bfloat16", "float32"] if options.dtype == "auto" else [options.dtype]
    report = Report("linear", options)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        config = load_config(open_base(options.base, Path(folder), is_tiny=options.quick))
        for dtype in dtypes:
            compare(report, config, getattr(torch, dtype), 2 if options.quick else options.rounds)
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
