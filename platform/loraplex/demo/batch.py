"""What the engine's own counters say about a stretch of time: how many steps, and what shared one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r'^(\w+)(?:\{le="([^"]+)"\})? (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class BatchProof:
    """Counts of one stretch: steps, the most requests and adapters in one of them, base linears a step.

    `num_steps_at_max` steps held `max_requests` requests.
    """

    num_steps: int
    max_requests: int
    num_steps_at_max: int
    max_adapters: int
    gemms_per_step: float


def parse_samples(text: str) -> dict[tuple[str, str], float]:
    """Return (name, upper bound of the bucket or '') to value, for samples without other labels."""
    return {(name, bound): float(value) for name, bound, value in _SAMPLE.findall(text)}


def compare(before: str, after: str) -> BatchProof:
    """Return what happened between two scrapes in the Prometheus text format."""
    old, new = parse_samples(before), parse_samples(after)
    change = {key: value - old.get(key, 0.0) for key, value in new.items()}
    num_steps = int(change.get(("loraplex_step_adapters_count", ""), 0))
    max_requests, num_at_max = _find_top_bucket(change, "loraplex_step_requests_bucket")
    max_adapters, _ = _find_top_bucket(change, "loraplex_step_adapters_bucket")
    gemms = change.get(("loraplex_base_gemm_calls_total", ""), 0.0)
    return BatchProof(num_steps, max_requests, num_at_max, max_adapters, gemms / max(num_steps, 1))


def _find_top_bucket(change: Mapping[tuple[str, str], float], histogram: str) -> tuple[int, int]:
    """Return the highest bucket that took steps, and how many; buckets are cumulative."""
    bound_to_count = {
        float(bound): count for (name, bound), count in change.items() if name == histogram and bound != "+Inf"
    }
    top, num_top, num_below = 0, 0, 0
    for bound, count in sorted(bound_to_count.items()):
        if count > num_below:
            top, num_top = int(bound), int(count) - num_below
        num_below = int(count)
    return top, num_top
