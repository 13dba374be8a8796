"""Adapter slots on the device. `SlotTable` is the only writer of slot state; it knows digests and pins, never tensors.

    EMPTY -assign-> LOADING -mark_ready-> READY <-revive / drain-> DRAINING -release-> EMPTY
                    LOADING -release-> EMPTY         READY -evict (in assign)-> LOADING of another digest

A pin is a running request that needs the slot; `keep` is an operator's wish that it stays.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import Enum


class SlotState(Enum):
    """What a slot is doing."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class Slot:
    """One slot: its digest, state and pins; `ready_at` is in seconds, `used_at` counts acts of the table."""

    state: SlotState = SlotState.EMPTY
    digest: str | None = None
    num_pins: int = 0
    keep: bool = False
    ready_at: float = 0.0
    used_at: int = 0

    @property
    def answers(self) -> bool:
        """The bank holds the digest, so requests for it can run."""
        return self.state in (SlotState.READY, SlotState.DRAINING)

    @property
    def is_idle(self) -> bool:
        """READY, with nobody who needs it: another adapter may have it."""
        return self.state is SlotState.READY and self.num_pins == 0 and not self.keep


class SlotTable:
    """Fixed number of adapter slots with pins and least-recently-used eviction."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [Slot() for _ in range(num_slots)]
        self._digest_to_slot: dict[str, int] = {}
        self._clock = 0
        self.num_loads = 0
        self.num_evictions = 0

    def find(self, digest: str) -> int | None:
        """Slot that holds the digest in any state, or None."""
        return self._digest_to_slot.get(digest)

    def is_ready(self, digest: str) -> bool:
        """Whether requests may use the digest now."""
        slot_id = self._digest_to_slot.get(digest)
        return slot_id is not None and self.slots[slot_id].answers

    def try_assign(self, digest: str, protected: Container[str | None] = ()) -> int | None:
        """Give the digest a LOADING slot: an empty one, else the least recently used READY one without pins.

        Returns None when every slot is needed or holds a protected digest. The digest must not have a slot yet.
        """
        assert digest not in self._digest_to_slot
        slot_id = self._pick(protected)
        if slot_id is None:
            return None
        slot = self.slots[slot_id]
        if slot.digest is not None:
            del self._digest_to_slot[slot.digest]
            self.num_evictions += 1
        self.slots[slot_id] = Slot(SlotState.LOADING, digest, used_at=self._tick())
        self._digest_to_slot[digest] = slot_id
        return slot_id

    def mark_ready(self, slot_id: int, now: float = 0.0) -> None:
        """LOADING -> READY: the bank holds the adapter from `now` on, in seconds."""
        assert self.slots[slot_id].state is SlotState.LOADING
        self.slots[slot_id].state = SlotState.READY
        self.slots[slot_id].ready_at = now
        self.num_loads += 1

    def pin(self, slot_id: int) -> None:
        """A request starts to use a slot that answers."""
        slot = self.slots[slot_id]
        assert slot.answers
        slot.num_pins += 1
        slot.used_at = self._tick()

    def unpin(self, slot_id: int) -> None:
        """A request no longer uses the slot."""
        slot = self.slots[slot_id]
        assert slot.num_pins > 0
        slot.num_pins -= 1
        slot.used_at = self._tick()

    def drain(self, slot_id: int) -> None:
        """READY -> DRAINING: its digest is to go; requests that came for it still use it, `release` ends it."""
        slot = self.slots[slot_id]
        assert slot.state is SlotState.READY
        slot.state = SlotState.DRAINING
        slot.keep = False

    def revive(self, slot_id: int) -> None:
        """DRAINING -> READY: the digest may stay after all."""
        assert self.slots[slot_id].state is SlotState.DRAINING
        self.slots[slot_id].state = SlotState.READY

    def release(self, slot_id: int) -> None:
        """LOADING or DRAINING without pins -> EMPTY."""
        slot = self.slots[slot_id]
        assert slot.state in (SlotState.LOADING, SlotState.DRAINING)
        assert slot.num_pins == 0
        assert slot.digest is not None
        del self._digest_to_slot[slot.digest]
        self.slots[slot_id] = Slot()

    def check_integrity(self) -> None:
        """Assert that digests and slots are one to one and that states fit their facts."""
        held = {slot.digest: i for i, slot in enumerate(self.slots) if slot.digest is not None}
        assert held == self._digest_to_slot
        for slot in self.slots:
            assert (slot.state is SlotState.EMPTY) == (slot.digest is None)
            assert slot.num_pins == 0 or slot.answers
            assert not slot.keep or slot.state in (SlotState.LOADING, SlotState.READY)

    def _pick(self, protected: Container[str | None]) -> int | None:
        for slot_id, slot in enumerate(self.slots):
            if slot.state is SlotState.EMPTY:
                return slot_id
        idle = [
            (slot.used_at, slot_id)
            for slot_id, slot in enumerate(self.slots)
            if slot.is_idle and slot.digest not in protected
        ]
        return min(idle)[1] if idle else None

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
