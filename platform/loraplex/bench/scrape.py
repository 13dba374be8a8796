"""What the server's own metrics say of a stretch of time: waits in the queue and prefills, from histograms.

Two scrapes in the Prometheus text format; the difference of their buckets is the stretch. A quantile lies somewhere in
its bucket, and is told as if values were spread evenly in it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from loraplex.bench.figure import PERCENTS, Spread, count_needed

NAMES = {
    "queue": (
        "loraplex_request_queue_seconds",
        "vllm:request_queue_time_seconds",
        "sglang:queue_time_seconds",
        "tgi_request_queue_duration",
    ),
    "prefill": ("loraplex_request_prefill_seconds", "vllm:request_prefill_time_seconds"),
}
_SAMPLE = re.compile(r"^([\w:]+?)_(bucket|sum)(?:\{(.*?)\})? (\S+)(?: \d+)?$", re.MULTILINE)
_BOUND = re.compile(r'\ble="([^"]+)"')
_KNOWN = {name for names in NAMES.values() for name in names}
Samples = dict[tuple[str, str], float]
"""By metric and upper bound of the bucket, or `sum`; series of other labels are added up."""


def read_samples(text: str) -> Samples:
    """Return the histograms that are known here."""
    samples: Samples = defaultdict(float)
    for name, kind, labels, value in _SAMPLE.findall(text):
        bound = _BOUND.search(labels or "")
        if name in _KNOWN and (bound or kind == "sum"):
            samples[name, bound[1] if bound else "sum"] += float(value)
    return samples


def find_server_times(before: Samples, after: Samples) -> dict[str, Spread]:
    """Return the spread of queue and prefill times between two scrapes, of those that the server counts."""
    found = {}
    for kind, names in NAMES.items():
        for name in names:
            change = {
                bound: value - before.get((name, bound), 0.0)
                for (metric, bound), value in after.items()
                if metric == name
            }
            if change.get("+Inf"):
                found[kind] = _spread(change)
    return found


def _spread(change: Mapping[str, float]) -> Spread:
    num = int(change["+Inf"])
    cumulative = sorted((float(bound), count) for bound, count in change.items() if bound != "sum")
    told = {
        f"p{percent}": _find_quantile(cumulative, percent / 100 * num)
        for percent in PERCENTS
        if num >= count_needed(percent)
    }
    return Spread(num=num, mean=change.get("sum", 0.0) / num, **told)


def _find_quantile(cumulative: list[tuple[float, float]], rank: float) -> float | None:
    """Return where the rank lies; None if that is beyond the last bound."""
    low, num_below = 0.0, 0.0
    for bound, count in cumulative:
        if count >= rank:
            if bound == float("inf"):
                return None
            return low + (bound - low) * (rank - num_below) / max(count - num_below, 1e-9)
        low, num_below = bound, count
    return None
