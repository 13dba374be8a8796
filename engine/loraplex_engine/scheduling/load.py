"""Reads an engine's counters for its `Advisor`; changes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from loraplex_engine.kv.pool import BlockPool
from loraplex_engine.scheduling.advice import EngineLoad
from loraplex_engine.scheduling.cost import StepCost
from loraplex_engine.scheduling.scheduler import Scheduler


class LoadReader:
    """Called, answers with the counters of the moment; `flags` are those that never change."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        cost: StepCost,
        flags: EngineLoad,
        clock: Callable[[], float] = time.monotonic,
        meter: CpuMeter | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._cost = cost
        self._flags = flags
        self._clock = clock
        self._meter = meter or CpuMeter(clock=clock)

    def __call__(self) -> EngineLoad:
        """The counters of the moment."""
        now, scheduler = self._clock(), self._scheduler
        slots = scheduler.turns.describe(list(scheduler.waiting))
        return replace(
            self._flags,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            oldest_wait_s=max((now - r.arrived_at for r in scheduler.waiting if r.load_wait_at is None), default=0.0),
            kv_usage_ratio=self._pool.usage_ratio,
            num_preemptions=scheduler.num_preemptions,
            num_overcommitted=max(0, slots.working_set - slots.slots),
            oldest_slot_wait_s=slots.oldest_wait_s,
            slowness=self._cost.slowness,
            other_cores=self._meter.read(),
        )


class CpuMeter:
    """How many cores other processes use, by the kernel's counters; none where there are no counters."""

    def __init__(
        self,
        stat: Path = Path("/proc/stat"),
        own_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stat = stat
        self._own_s = own_s
        self._clock = clock
        self._read_at = clock()
        self._others_s = self._read()

    def read(self) -> float:
        """Cores that others used since the last call."""
        seconds, self._read_at = self._clock() - self._read_at, self._clock()
        others_s, self._others_s = self._others_s, self._read()
        return max(0.0, self._others_s - others_s) / seconds if seconds > 0 else 0.0

    def _read(self) -> float:
        """CPU seconds of all other processes up to now."""
        try:
            user, nice, system, _, _, irq, softirq, steal = map(int, self._stat.read_text().split("\n")[0].split()[1:9])
        except (OSError, ValueError):
            return 0.0
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - self._own_s()
