from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_engine.scheduling.cost import Chunk, CostRates, StepCost, calibrate

contexts = st.lists(st.integers(1, 8192), max_size=16)
chunks = st.lists(st.tuples(st.integers(0, 8192), st.integers(1, 2048)), max_size=8)
seconds = st.floats(0.0, 1e6) | st.sampled_from([0.0, 1e-12, 1e9])


@given(st.lists(st.tuples(contexts, chunks, seconds), max_size=200), contexts, chunks)
def test_no_measurement_moves_the_estimate_beyond_a_factor_of_eight(
    steps: list[tuple[list[int], list[Chunk], float]], rows: list[int], prompts: list[Chunk]
) -> None:
    cost, prior = StepCost(), StepCost()
    for step in steps:
        cost.observe(*step)
    expected_s = prior.step_s(rows, prompts)
    assert expected_s / 8.001 <= cost.step_s(rows, prompts) <= 8.001 * expected_s


@pytest.mark.parametrize(("seconds", "ratio"), [(1e9, 8.0), (1e-9, 1 / 8)])
def test_lasting_nonsense_stops_at_a_factor_of_eight(seconds: float, ratio: float) -> None:
    cost, prior = StepCost(), StepCost()
    for _ in range(200):
        cost.observe([100], [], seconds)
        cost.observe([], [(0, 100)], seconds)
    assert cost.decode_s([100]) == pytest.approx(ratio * prior.decode_s([100]))
    assert cost.chunk_s(0, 100) == pytest.approx(ratio * prior.chunk_s(0, 100))


@given(st.integers(0, 100_000), st.floats(-1.0, 100.0), st.floats(0.1, 10.0))
def test_fit_is_the_largest_chunk_that_fits(start: int, limit_s: float, speed: float) -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe([], [(0, 100)], speed * cost.chunk_s(0, 100))
    count = cost.fit(start, limit_s)
    assert cost.chunk_s(start, count) <= max(0.0, limit_s) * (1 + 1e-9)
    assert cost.chunk_s(start, count + 1) > limit_s * (1 - 1e-9)


@pytest.mark.parametrize("slowness", [0.3, 0.9, 2.0, 5.0])
def test_estimate_follows_a_machine_of_another_speed(slowness: float) -> None:
    truth = StepCost(CostRates(6e-3 * slowness, 5.6e-4 * slowness, 2.5e-4 * slowness, 6e-7 * slowness, 1e-7 * slowness))
    cost = StepCost()
    decode, mixed = ([300] * 8, []), ([300] * 8, [(0, 100)])
    for _ in range(60):
        for step in (decode, mixed):
            cost.observe(*step, truth.step_s(*step))
    for step in (decode, mixed):
        assert cost.step_s(*step) == pytest.approx(truth.step_s(*step), rel=0.1)


def test_a_stalled_step_moves_the_estimate_by_five_per_cent_at_most() -> None:
    cost = StepCost()
    before_s = cost.step_s([100] * 8, [(0, 100)])
    cost.observe([100] * 8, [], 10.0)
    cost.observe([100] * 8, [(0, 100)], 10.0)
    assert before_s < cost.step_s([100] * 8, [(0, 100)]) < 1.06 * before_s


def test_decode_step_teaches_nothing_about_prompts() -> None:
    cost = StepCost()
    before_s = cost.chunk_s(0, 100)
    cost.observe([100] * 8, [], 1.0)
    assert cost.chunk_s(0, 100) == before_s


class Machine:
    """Answers `time_step` by rates of its own; every other step is held up, as by another process."""

    def __init__(self, rates: CostRates, stall_s: float = 0.0) -> None:
        self.truth = StepCost(rates)
        self.spent_s = 0.0
        self.longest = 0
        self._stall_s = stall_s
        self.num_steps = 0

    def time_step(self, rows: Sequence[Chunk]) -> float:
        self.num_steps += 1
        self.longest = max(self.longest, *(start + count for start, count in rows))
        decoding = [start for start, count in rows if count == 1]
        seconds = self.truth.step_s(decoding, [row for row in rows if row[1] > 1])
        self.spent_s += seconds
        return seconds + (self._stall_s if self.num_steps % 2 else 0.0)


@pytest.mark.parametrize("stall_s", [0.0, 0.02])
def test_calibration_finds_the_rates_of_a_machine(stall_s: float) -> None:
    machine = Machine(CostRates(2e-3, 2e-4, 6e-5, 4e-7, 1e-7), stall_s)
    cost = calibrate(machine.time_step, 8192)
    for rows, prompts in (([160] * 16, []), ([160] * 16, [(0, 64)]), ([], [(0, 1024)]), ([4000] * 4, [(5000, 100)])):
        assert cost.step_s(rows, prompts) == pytest.approx(machine.truth.step_s(rows, prompts), rel=0.1)


def test_calibration_takes_less_than_a_third_of_a_second() -> None:
    machine = Machine(CostRates())
    calibrate(machine.time_step, 8192)
    assert machine.spent_s < 0.3


@pytest.mark.parametrize("max_context", [1, 2, 17, 64, 65, 1024, 1025])
def test_calibration_stays_within_the_longest_request(max_context: int) -> None:
    machine = Machine(CostRates())
    cost = calibrate(machine.time_step, max_context)
    assert machine.longest <= max_context
    assert cost.step_s([1] * 4, [(0, 16)]) == pytest.approx(machine.truth.step_s([1] * 4, [(0, 16)]), rel=0.5)


def test_calibration_survives_noise_that_makes_no_sense() -> None:
    """A chunk seems to take less time than one row; all rates stay positive."""
    times = iter([0.01] * 2 + [0.001] * 8)
    cost = calibrate(lambda _: next(times), 8192)
    assert 0 < cost.decode_s([100]) < cost.decode_s([100] * 2)
    assert 0 < cost.chunk_s(0, 10) < cost.chunk_s(100, 10)


def test_calibration_on_a_busy_machine_scales_the_default_rates_and_stops() -> None:
    machine = Machine(CostRates(0.6, 0.056, 0.025, 6e-5, 1.5e-5))
    cost = calibrate(machine.time_step, 8192)
    assert machine.num_steps == 2
    for step in (([160] * 16, []), ([], [(1000, 100)])):
        assert cost.step_s(*step) == pytest.approx(machine.truth.step_s(*step), rel=0.1)
