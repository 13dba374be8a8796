"""How long a step will take, before it runs. `StepCost` owns the estimate; it knows token counts, never requests.

A step costs something fixed, each decoding row and each prompt token its share of the linears, each (token, earlier
position) pair its share of the attention. `calibrate` times a few steps at start; from then on two factors, one of
decoding and one of prompts, follow what steps really take. A measurement moves its factor by a few per cent at most,
whatever it says, and never beyond a factor of eight: a step that another process held up cannot spoil the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Chunk = tuple[int, int]
"""(start, count): prompt tokens [start, start + count) of one request."""

_MAX_FACTOR = 8.0
_GAIN = 0.2
_MAX_SURPRISE = 0.25
"""A measurement counts as at most this far from the estimate (natural logarithm), so it moves a factor by 5 %."""
_MIN_PROMPT_SHARE = 0.2
"""A step tells something about prompts if they are at least this share of its estimate."""
_NUM_ROWS = 8
_MAX_CALIBRATION_S = 0.2
"""After this many seconds no further step is timed."""


@dataclass(frozen=True, slots=True)
class CostRates:
    """Seconds of the parts of a step. The defaults are SmolLM2-135M on two cores of a Zen 5."""

    step_s: float = 6e-3
    """Of any step."""
    row_s: float = 5.6e-4
    """Of a row that decodes, beside its attention."""
    token_s: float = 2.5e-4
    """Of a prompt token, beside its attention."""
    row_pair_s: float = 6e-7
    """Of one earlier position of a row that decodes."""
    token_pair_s: float = 1.5e-7
    """Of one earlier position of a prompt token."""


class StepCost:
    """Predicts the seconds of a step and learns from steps; not thread-safe."""

    def __init__(self, rates: CostRates | None = None) -> None:
        self._rates = rates or CostRates()
        self._decode_factor = 1.0
        self._prompt_factor = 1.0

    @property
    def slowness(self) -> float:
        """What decoding takes of late over what it took when the rates were found."""
        return self._decode_factor

    def decode_s(self, context_lens: Sequence[int]) -> float:
        """Seconds of a step in which rows of these context lengths get their next token; 0 for no rows."""
        if not context_lens:
            return 0.0
        rates = self._rates
        seconds = rates.step_s + rates.row_s * len(context_lens) + rates.row_pair_s * sum(context_lens)
        return self._decode_factor * seconds

    def chunk_s(self, start: int, count: int) -> float:
        """Seconds by which prompt tokens [start, start + count) prolong a step."""
        rates = self._rates
        return self._prompt_factor * count * (rates.token_s + rates.token_pair_s * (start + count / 2))

    def step_s(self, context_lens: Sequence[int], chunks: Sequence[Chunk]) -> float:
        """Seconds of a whole step; 0 for an empty one."""
        prompt_s = sum([self.chunk_s(start, count) for start, count in chunks])
        return self._fixed_s(context_lens, has_chunks=bool(chunks)) + prompt_s

    def _fixed_s(self, context_lens: Sequence[int], *, has_chunks: bool) -> float:
        """Seconds of what is no prompt."""
        if context_lens:
            return self.decode_s(context_lens)
        return self._decode_factor * self._rates.step_s if has_chunks else 0.0

    def fit(self, start: int, seconds: float) -> int:
        """The largest `count` with `chunk_s(start, count) <= seconds`."""
        if seconds <= 0.0:
            return 0
        rates = self._rates
        # the positive root of pair/2 * n^2 + (token + pair * start) * n = seconds, in the form that does not cancel
        linear = rates.token_s + rates.token_pair_s * start
        seconds /= self._prompt_factor
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 2 * rates.token_pair_s * seconds)))

    def observe(self, context_lens: Sequence[int], chunks: Sequence[Chunk], seconds: float) -> None:
        """Learn from a step that took `seconds`; 0 or less tells nothing."""
        prompt_s = sum([self.chunk_s(start, count) for start, count in chunks])
        expected_s = self._fixed_s(context_lens, has_chunks=bool(chunks)) + prompt_s
        if seconds <= 0.0 or expected_s <= 0.0:
            return
        if prompt_s == 0.0:
            self._decode_factor = _follow(self._decode_factor, seconds / expected_s)
        elif prompt_s >= _MIN_PROMPT_SHARE * expected_s:
            left_s = max(seconds - (expected_s - prompt_s), 0.0)
            self._prompt_factor = _follow(self._prompt_factor, left_s / prompt_s)


def calibrate(time_step: Callable[[Sequence[Chunk]], float], max_context: int) -> StepCost:
    """Find the rates by five short steps, each timed twice; the better time counts.

    On a machine too slow or too busy for that, the first steps scale the default rates and the others are left out.

    Args:
        time_step: runs one step of these rows (start, count) and returns its seconds; rows of one token decode.
        max_context: positions that a row may have.
    """
    spent_s = 0.0

    def measure(*rows: Chunk) -> float:
        nonlocal spent_s
        if spent_s > _MAX_CALIBRATION_S:
            return math.nan
        times = time_step(rows), time_step(rows)
        spent_s += sum(times)
        return min(times)

    num_tokens = min(64, max_context)
    depth, deep = min(1024, max_context - num_tokens), min(1024, max_context - 1)
    one_s = measure((0, 1))
    chunk_s = measure((0, num_tokens))
    many_s = measure(*[(0, 1)] * _NUM_ROWS)
    far_s = measure((depth, num_tokens)) if depth else math.nan
    deep_s = measure(*[(deep, 1)] * _NUM_ROWS)

    prior = CostRates()
    scale = one_s / (prior.step_s + prior.row_s)
    row_s = _trust((many_s - one_s) / (_NUM_ROWS - 1), scale * prior.row_s)
    step_s = max(one_s - row_s, one_s / 2)
    return StepCost(
        CostRates(
            step_s=step_s,
            row_s=row_s,
            token_s=_trust((chunk_s - step_s) / num_tokens, scale * prior.token_s),
            row_pair_s=_trust((deep_s - many_s) / (_NUM_ROWS * max(1, deep)), scale * prior.row_pair_s),
            token_pair_s=_trust((far_s - chunk_s) / (num_tokens * max(1, depth)), scale * prior.token_pair_s),
        )
    )


def _follow(factor: float, ratio: float) -> float:
    """The factor, moved towards `factor * ratio` by a bounded amount and within its bounds."""
    surprise = math.log(ratio) if ratio > 0.0 else -_MAX_SURPRISE
    surprise = max(-_MAX_SURPRISE, min(_MAX_SURPRISE, surprise))
    return max(1 / _MAX_FACTOR, min(_MAX_FACTOR, factor * math.exp(_GAIN * surprise)))


def _trust(measured: float, expected: float) -> float:
    """A measured rate within a factor of eight of the expected one, which noise can pass; the expected one for NaN."""
    if math.isnan(measured):
        return expected
    return max(expected / _MAX_FACTOR, min(_MAX_FACTOR * expected, measured))
