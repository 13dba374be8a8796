"""The client's own pulse while it measures: how late its event loop is, how much of a core it takes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

_PERIOD_S = 0.01


@dataclass
class Pulse:
    """Wakes a hundred times a second and notes how late; start and stop it within one loop."""

    lags_s: list[float] = field(default_factory=list)
    cpu_share: float = 0.0
    """Cores that this process used, on average."""

    def start(self) -> None:
        """Begin."""
        self._began_at, self._cpu_began_s = time.perf_counter(), time.process_time()
        self._task = asyncio.create_task(self._beat())

    def stop(self) -> None:
        """End, and note what was used."""
        self._task.cancel()
        elapsed_s = time.perf_counter() - self._began_at
        self.cpu_share = (time.process_time() - self._cpu_began_s) / max(elapsed_s, 1e-9)

    async def _beat(self) -> None:
        while True:
            due_at = time.perf_counter() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            self.lags_s.append(max(0.0, time.perf_counter() - due_at))
