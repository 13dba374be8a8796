"""How long to wait before a child is started again: 1, 2, 4 ... 60 seconds, from 1 again after a good minute."""

from __future__ import annotations

_FIRST_S, _LONGEST_S, _GOOD_RUN_S = 1.0, 60.0, 60.0


class Backoff:
    """The waits of one child."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    def next_wait_s(self, ran_s: float) -> float:
        """Return the wait after a run of `ran_s` seconds."""
        if ran_s >= _GOOD_RUN_S:
            self._next_s = _FIRST_S
        wait_s = self._next_s
        self._next_s = min(2 * self._next_s, _LONGEST_S)
        return wait_s
