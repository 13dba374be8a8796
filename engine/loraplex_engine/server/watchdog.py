"""When a silent core counts as stuck. `Watchdog` counts ticks; who ticks, and who ends the core, is `CoreProcess`.

Silence is counted in ticks and not by a clock: a front that was stopped itself, or a machine that slept, has ticked no
more than its core has spoken.
"""

from __future__ import annotations


class Watchdog:
    """Ticks without a word of the core.

    Args:
        timeout_s: silence after which the core is stuck, unless it has asked for more patience.
        tick_s: what one tick stands for.
    """

    def __init__(self, timeout_s: float, tick_s: float) -> None:
        self.tick_s = tick_s
        self._timeout_s = timeout_s
        self._patience_s = timeout_s
        self._silent_s = 0.0

    def hear(self, patience_s: float = 0.0) -> None:
        """The core has spoken, and may be silent for so long before its next word; 0: no longer than usual."""
        self._silent_s = 0.0
        self._patience_s = max(patience_s, self._timeout_s)

    def tick(self) -> bool:
        """Count one tick; whether the core is stuck."""
        self._silent_s += self.tick_s
        return self._silent_s > self._patience_s
