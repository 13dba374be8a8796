"""Times a few steps of the real model when an engine starts, so that the first long prompt is already cut to size."""

from __future__ import annotations

import time
from collections.abc import Sequence

from loraplex_engine.core.request import Request
from loraplex_engine.core.step import PlannedRow, StepPlan
from loraplex_engine.runner import ModelRunner
from loraplex_engine.scheduling.cost import Chunk, StepCost, calibrate
from loraplex_engine.wire.messages import SamplingParams


def calibrate_runner(runner: ModelRunner, num_blocks: int, block_size: int, max_model_len: int) -> StepCost:
    """The cost of steps on this machine, by 15 of them; what they leave in the KV pool belongs to nobody.

    Args:
        runner: runs the steps; nothing else may use it meanwhile.
        num_blocks: blocks of the KV pool; rows share blocks where it has too few.
        block_size: positions of a block.
        max_model_len: positions that a row may have.
    """

    def time_step(rows: Sequence[Chunk]) -> float:
        plan = StepPlan([_plan_row(index, chunk, num_blocks, block_size) for index, chunk in enumerate(rows)])
        started_at = time.perf_counter()
        runner.execute(plan)
        return time.perf_counter() - started_at

    return calibrate(time_step, min(max_model_len, num_blocks * block_size))


def _plan_row(index: int, chunk: Chunk, num_blocks: int, block_size: int) -> PlannedRow:
    start, count = chunk
    used = -(-(start + count) // block_size)
    block_ids = [(index * used + block) % num_blocks for block in range(used)]
    params = SamplingParams(max_tokens=1, temperature=0.0)
    request = Request(f"calibration-{index}", [0] * (start + count), params, block_ids=block_ids, num_computed=start)
    return PlannedRow(request, start, count, samples=count == 1)
