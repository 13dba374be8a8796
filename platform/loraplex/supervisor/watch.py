"""Ends a child that has served and then answers nothing for half a minute; `Child` starts it again.

Silence is counted in looks and not by a clock: a machine that slept, or a supervisor that was stopped itself, has
looked no more often than it was answered. A child that still starts may take its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx

from loraplex.supervisor.child import Child

SILENCE_S = 30.0
_LOOK_S = 5.0


class Watch:
    """Looks at one child.

    Args:
        child: Whose process is ended.
        url: An address that it answers at once, whatever it is busy with.
        on_stuck: Told of each end with the child's name and the seconds of silence.
        look_s: Between two looks, and the longest wait for an answer.
        silence_s: From then on it counts as stuck.
    """

    def __init__(
        self,
        child: Child,
        url: str,
        on_stuck: Callable[[str, float], None],
        *,
        look_s: float = _LOOK_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._child = child
        self._url = url
        self._on_stuck = on_stuck
        self._look_s, self._silence_s = look_s, silence_s
        self._served_pid: int | None = None
        self._silent_s = 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        async with httpx.AsyncClient(timeout=self._look_s, trust_env=False) as http:
            while True:
                # a look that waits for an answer in vain takes as long as the pause
                await asyncio.gather(self._look(http), asyncio.sleep(self._look_s))

    async def _look(self, http: httpx.AsyncClient) -> None:
        pid = self._child.pid
        try:
            await http.get(self._url)
        except httpx.TransportError:
            # one that has just been started anew has not fallen silent
            has_served = pid is not None and pid == self._served_pid
            self._silent_s = self._silent_s + self._look_s if has_served else 0.0
        else:
            self._served_pid, self._silent_s = pid, 0.0
        if self._silent_s >= self._silence_s:
            self._on_stuck(self._child.spec.name, self._silent_s)
            self._silent_s = 0.0
            self._child.kill()
