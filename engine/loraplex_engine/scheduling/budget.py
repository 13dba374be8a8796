"""How many prompt tokens join a step. `StepBudget` turns the time that a step may take into tokens; it plans nothing.

1. Beside requests that decode, a step takes at most three times their own step, or 60 ms if that is more.
2. Below that, what prompts may add grows with the work that waits: a sixth of the backlog's seconds, times prompts over
   decoding rows. One short prompt rides along in chunks that hardly widen the gap between tokens; a burst, or a prompt
   of thousands of tokens, gets the whole limit at once.
3. But never less than half a decode step, so that every prompt moves, nor less than what fills a step of 20 ms: at that
   pace nobody reads along.
4. When nothing decodes there is nobody to delay, and a step lasts a second at most.

Simulated with measured costs, 16 streams that ask anew at once: a constant share of the step meets either the 95th
percentile of the gaps or that of the first tokens, a share that follows the backlog meets both.
"""

from __future__ import annotations

from collections.abc import Sequence

from loraplex_engine.scheduling.cost import Chunk, StepCost

_MAX_DECODE_STEPS, _MIN_LIMIT_S = 3.0, 0.060
_MARGIN = 0.9
"""Estimates err, and the limit is of what a client sees."""
_IDLE_LIMIT_S = 1.0
_BACKLOG_STEPS = 6.0
_MIN_SHARE, _MIN_STEP_S = 0.5, 0.020
_MIN_CHUNK = 8
"""Smaller chunks cost more than they compute; one of this size moves the oldest prompt on in any step."""


class StepBudget:
    """The time of one step after the other; `begin`, then `allow` per prompt, then `observe`."""

    def __init__(self, cost: StepCost | None = None) -> None:
        self.cost = cost or StepCost()
        self._left_s = 0.0
        self._is_first = True

    def begin(self, decode_context_lens: Sequence[int], prompts: Sequence[Chunk]) -> None:
        """Start to plan a step.

        Args:
            decode_context_lens: positions of each row that gets its next token in this step.
            prompts: (first uncomputed position, tokens to compute) of each prompt that could take part.
        """
        self._is_first = True
        if not decode_context_lens:
            self._left_s = _IDLE_LIMIT_S
            return
        decode_s = self.cost.decode_s(decode_context_lens)
        limit_s = _MARGIN * max(_MAX_DECODE_STEPS * decode_s, _MIN_LIMIT_S) - decode_s
        backlog_s = sum(self.cost.chunk_s(start, count) for start, count in prompts)
        fair_s = backlog_s / _BACKLOG_STEPS * len(prompts) / len(decode_context_lens)
        self._left_s = min(limit_s, max(_MIN_SHARE * decode_s, _MIN_STEP_S - decode_s, fair_s))

    def allow(self, start: int, wanted: int) -> int:
        """Book tokens of a prompt that is computed up to `start`; called oldest first.

        Returns:
            At most `wanted`; 0 when the step is full. The first prompt of a step always gets a chunk.
        """
        count = min(wanted, self.cost.fit(start, self._left_s))
        if count < min(wanted, _MIN_CHUNK):
            count = min(wanted, _MIN_CHUNK) if self._is_first else 0
        self._is_first = False
        self._left_s -= self.cost.chunk_s(start, count)
        return count

    def observe(self, decode_context_lens: Sequence[int], chunks: Sequence[Chunk], seconds: float) -> None:
        """Learn from a step that ran: its rows and the seconds it took."""
        self.cost.observe(decode_context_lens, chunks, seconds)
