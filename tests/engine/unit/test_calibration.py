from __future__ import annotations

import pytest

from loraplex_engine.core.step import StepPlan, StepResult
from loraplex_engine.loop.calibration import calibrate_runner


class RecordingRunner:
    """Keeps the plans that it is told to run."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return StepResult({})


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(1, 16), (3, 48), (40, 8192), (2000, 8192)])
def test_calibration_steps_fit_the_pool_and_the_longest_request(num_blocks: int, max_model_len: int) -> None:
    runner = RecordingRunner()
    calibrate_runner(runner, num_blocks, 16, max_model_len)  # type: ignore[arg-type]
    assert runner.plans
    for row in (row for plan in runner.plans for row in plan.rows):
        request = row.request
        assert row.start == request.num_computed
        assert row.stop == request.num_tokens <= min(max_model_len, num_blocks * 16)
        assert len(request.block_ids) == -(-row.stop // 16)
        assert set(request.block_ids) <= set(range(num_blocks))
