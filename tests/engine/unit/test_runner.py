"""What the runner says of a step beside the tokens."""

from __future__ import annotations

import torch

from loraplex_engine.core.request import Request
from loraplex_engine.core.step import PlannedRow, StepPlan
from loraplex_engine.runner import _find_vouched
from loraplex_engine.wire.messages import SamplingParams


def test_only_finite_parts_of_prompts_are_vouched_for() -> None:
    def row(name: str, num_tokens: int, *, samples: bool = False, wants_logits: bool = False) -> PlannedRow:
        request = Request(name, [0] * 8, SamplingParams(1), wants_logits=wants_logits)
        return PlannedRow(request, 0, num_tokens, samples)

    rows = [row("done", 2, samples=True), row("clean", 3), row("tainted", 3), row("scored", 2, wants_logits=True)]
    hidden = torch.zeros(10, 4)
    # not the last row of the part: with a sliding window that one need not have seen it
    hidden[5, 1] = torch.nan
    assert _find_vouched(StepPlan(rows), hidden) == {"clean"}
    hidden[3, 0] = torch.inf
    assert _find_vouched(StepPlan(rows), hidden) == frozenset()
