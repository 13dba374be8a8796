"""Adapter slots on the device. `SlotTable` is the only writer of slot state; it knows digests and pins, never tensors.

    EMPTY -assign-> LOADING -mark_ready-> READY -drain-> DRAINING -release-> EMPTY
                    LOADING -release-> EMPTY         READY -evict (in assign)-> LOADING of another digest

A pin is a running request that needs the slot; `keep` is an operator's wish that it stays.
"""

from __future__ import annotations

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
    """One slot: its digest, state and pins; `assigned_at` and `used_at` count acts of the table, not time."""

    state: SlotState = SlotState.EMPTY
    digest: str | None = None
    num_pins: int = 0
    keep: bool = False
    assigned_at: int = 0
    used_at: int = 0


class SlotTable:
    """Fixed number of adapter slots with pins and least-recently-used eviction."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [Slot() for _ in range(num_slots)]
        self._digest_to_slot: dict[str, int] = {}
        self._clock = 0
        self.num_evictions = 0

    def find(self, digest: str) -> int | None:
        """Slot that holds the digest in any state, or None."""
        return self._digest_to_slot.get(digest)

    def is_ready(self, digest: str) -> bool:
        """Whether new requests may use the digest now."""
        slot_id = self._digest_to_slot.get(digest)
        return slot_id is not None and self.slots[slot_id].state is SlotState.READY

    def try_assign(self, digest: str) -> int | None:
        """Give the digest a LOADING slot: an empty one, else the least recently used READY one without pins.

        Returns None when every slot is needed. The digest must not have a slot yet.
        """
        assert digest not in self._digest_to_slot
        slot_id = self._pick()
        if slot_id is None:
            return None
        slot = self.slots[slot_id]
        if slot.digest is not None:
            del self._digest_to_slot[slot.digest]
            self.num_evictions += 1
        now = self._tick()
        self.slots[slot_id] = Slot(SlotState.LOADING, digest, assigned_at=now, used_at=now)
        self._digest_to_slot[digest] = slot_id
        return slot_id

    def mark_ready(self, slot_id: int) -> None:
        """LOADING -> READY: the bank holds the adapter."""
        assert self.slots[slot_id].state is SlotState.LOADING
        self.slots[slot_id].state = SlotState.READY

    def pin(self, slot_id: int) -> None:
        """A request starts to use a READY slot."""
        slot = self.slots[slot_id]
        assert slot.state is SlotState.READY
        slot.num_pins += 1
        slot.used_at = self._tick()

    def unpin(self, slot_id: int) -> None:
        """A request no longer uses the slot."""
        slot = self.slots[slot_id]
        assert slot.num_pins > 0
        slot.num_pins -= 1
        slot.used_at = self._tick()

    def drain(self, slot_id: int) -> None:
        """READY -> DRAINING: no new pins; `release` when the last one is gone."""
        slot = self.slots[slot_id]
        assert slot.state is SlotState.READY
        slot.state = SlotState.DRAINING
        slot.keep = False

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
            assert slot.num_pins == 0 or slot.state in (SlotState.READY, SlotState.DRAINING)
            assert not slot.keep or slot.state in (SlotState.LOADING, SlotState.READY)

    def _pick(self) -> int | None:
        for slot_id, slot in enumerate(self.slots):
            if slot.state is SlotState.EMPTY:
                return slot_id
        idle = [
            (slot.used_at, slot_id)
            for slot_id, slot in enumerate(self.slots)
            if slot.state is SlotState.READY and slot.num_pins == 0 and not slot.keep
        ]
        return min(idle)[1] if idle else None

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
