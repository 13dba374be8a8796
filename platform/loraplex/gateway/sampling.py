"""Statistics of engines, from what they say of themselves to the fleet once a second: nobody asks them for more."""

from __future__ import annotations

from typing import Any

from loraplex.fleet.view import FleetView
from loraplex.stats.piece import EngineSample
from loraplex.stats.recorder import StatsRecorder


def sample_engines(view: FleetView, recorder: StatsRecorder) -> None:
    """Note what each engine of a view says of itself; those that say nothing are left out."""
    for replica in view.replicas:
        if replica.state:
            recorder.sample(replica.name, replica.base or replica.model or "", read_sample(replica.state))


def read_sample(state: dict[str, Any]) -> EngineSample:
    """Return the numbers of an engine's state; one of another release says less, or says it otherwise."""
    slots = state.get("slots")
    slots = [slot for slot in slots if isinstance(slot, dict)] if isinstance(slots, list) else []
    num_blocks = _count(state, "kv", "num_blocks")
    return EngineSample(
        kv_usage=1 - min(_count(state, "kv", "num_free"), num_blocks) / num_blocks if num_blocks else 0.0,
        waiting=_count(state, "waiting"),
        running=_count(state, "running"),
        slots=len(slots),
        slots_used=sum(slot.get("digest") is not None for slot in slots),
        preemptions=_count(state, "preemptions"),
        prefix_queries=_count(state, "prefix_cache", "queries"),
        prefix_hits=_count(state, "prefix_cache", "hits"),
        loads=_count(state, "slot_loads"),
        evictions=_count(state, "slot_evictions"),
    )


def _count(state: dict[str, Any], *path: str) -> int:
    found: object = state
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, int) and found >= 0 else 0
