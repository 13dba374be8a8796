"""What the exceptions cost, and what forty of them would: sums and the arithmetic of copies. Pure.

The figures are those of the product's brief: an 8B base in bfloat16 and a rank-16 adapter on the attention projections.
Weights alone are counted, without cache and activations: the honest lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from loraplex.escalations.machine import OPEN_STATES, SERVING_STATES
from loraplex.escalations.record import EscalationView

NUM_TEAMS = 40
BASE_GIB = 14.96
ADAPTER_MB = 27.0
GPU, GPU_GIB = "H100 80 GB", 80.0
_GIB = 1 << 30


class Sums(msgspec.Struct, frozen=True):
    """Escalations of one currency that have a full fine-tune."""

    currency: str
    num_full: int
    cost_per_month: float
    mean_cost_per_month: float
    forty_would_cost_per_month: float


class Copies(msgspec.Struct, frozen=True):
    """What so many teams take as weights: GiB, and the cards that these fill."""

    teams: int
    weights_gib: float
    gpus: int
    gpu: str


class EscalationReport(msgspec.Struct, frozen=True, kw_only=True):
    """All escalations, what they cost, and what it would be if every team had one."""

    data: list[EscalationView]
    num_open: int
    num_active: int
    num_overdue: int
    costs: list[Sums]
    forty_full_fine_tunes: Copies
    forty_adapters: Copies


def build_report(escalations: Iterable[EscalationView]) -> EscalationReport:
    """Return the report on these escalations."""
    found = list(escalations)
    return EscalationReport(
        data=found,
        num_open=sum(one.state in OPEN_STATES for one in found),
        num_active=sum(one.state in SERVING_STATES for one in found),
        num_overdue=sum(one.is_overdue for one in found),
        costs=_sum_costs([one for one in found if one.state in ("registered", *SERVING_STATES)]),
        forty_full_fine_tunes=count_copies(NUM_TEAMS * BASE_GIB),
        forty_adapters=count_copies(BASE_GIB + NUM_TEAMS * ADAPTER_MB * 1e6 / _GIB),
    )


def count_copies(weights_gib: float) -> Copies:
    """Return the cards that weights of forty teams fill."""
    return Copies(NUM_TEAMS, round(weights_gib, 2), math.ceil(weights_gib / GPU_GIB), GPU)


def _sum_costs(full: list[EscalationView]) -> list[Sums]:
    sums = []
    for currency in sorted({one.currency for one in full if one.currency is not None}):
        costs = [one.cost_per_month or 0.0 for one in full if one.currency == currency]
        mean = sum(costs) / len(costs)
        sums.append(Sums(currency, len(costs), round(sum(costs), 2), round(mean, 2), round(NUM_TEAMS * mean, 2)))
    return sums
