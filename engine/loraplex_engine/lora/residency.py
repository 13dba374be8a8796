"""Which adapters are where. `Residency` moves digests from the loader to host memory to slots, on demand.

It is the only caller of `SlotTable`, the loader and the bank. It knows digests and pins, neither requests nor tensors.
A load goes: asked for -> loading -> host memory -> slot. Only the last step needs a slot: a slow download holds none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from loraplex_engine.errors import DigestMismatchError, LoadFailedError, RequestError
from loraplex_engine.lora.packed import LoadDone, LoadFailed, PackedAdapter
from loraplex_engine.slots.table import SlotState, SlotTable

_MAX_BACKOFF_S = 30.0


class Loader(Protocol):
    """Brings adapters into host memory beside the step loop; at most one job per digest at a time."""

    def start(self, digest: str) -> None:
        """Begin to load; returns at once."""

    def take_finished(self) -> list[PackedAdapter | LoadFailed]:
        """Results since the last call, each once; never waits."""


class Bank(Protocol):
    """Device memory of the slots."""

    def bind(self, slot_id: int, adapter: PackedAdapter) -> None:
        """Make the slot answer with this adapter, replacing what it held."""

    def clear(self, slot_id: int) -> None:
        """Make the slot hold nothing."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed load: what to tell requests, and when the next try may begin."""

    error: RequestError
    num_failures: int
    retry_at: float


class Residency:
    """Slots, host memory and loads of adapters, as one resource."""

    def __init__(
        self,
        slots: SlotTable,
        loader: Loader,
        bank: Bank,
        *,
        max_host: int,
        clock: Callable[[], float],
        on_loaded: Callable[[LoadDone | LoadFailed], None] = lambda _: None,
    ) -> None:
        self.slots = slots
        self._loader = loader
        self._bank = bank
        self._max_host = max_host
        self._clock = clock
        self._on_loaded = on_loaded
        self._host: OrderedDict[str, PackedAdapter] = OrderedDict()
        self._loading: set[str] = set()
        self._unwanted: set[str] = set()
        self._wanted: tuple[str, ...] = ()
        self._failures: dict[str, Failure] = {}
        self.num_host_evictions = 0

    @property
    def host_digests(self) -> tuple[str, ...]:
        """Digests in host memory, least recently used first."""
        return tuple(self._host)

    @property
    def loading_digests(self) -> tuple[str, ...]:
        """Digests on their way to host memory."""
        return tuple(sorted(self._loading))

    def try_pin(self, digest: str) -> int | None:
        """Pin the digest's slot for a request; None when it is not ready yet."""
        slot_id = self.try_make_ready(digest)
        if slot_id is not None:
            self.slots.pin(slot_id)
        return slot_id

    def try_make_ready(self, digest: str) -> int | None:
        """Slot of the digest if it is ready or can be made so now, else None; never starts a load."""
        slot_id = self.slots.find(digest)
        if slot_id is not None:
            return slot_id if self.slots.slots[slot_id].state is SlotState.READY else None
        return self._bind(digest) if digest in self._host else None

    def want(self, digests: Iterable[str]) -> None:
        """Load ahead for waiting requests, first come first served.

        Only as many as host memory can keep beside the slots' own are loaded, and those are not pushed out, so that
        a long queue of adapters never makes loads undo each other.
        """
        absent = [digest for digest in dict.fromkeys(digests) if self.slots.find(digest) is None]
        num_held = sum(slot.digest is not None for slot in self.slots.slots)
        self._wanted = tuple(absent[: max(1, self._max_host - num_held)])
        for digest in self._wanted:
            self.prefetch(digest)

    def prefetch(self, digest: str) -> None:
        """Start to bring a digest to host memory unless it is there, on its way, or lately failed."""
        self._unwanted.discard(digest)
        if digest in self._host or digest in self._loading or self.find_failure(digest) is not None:
            return
        self._loading.add(digest)
        self._loader.start(digest)

    def unpin(self, slot_id: int) -> None:
        """A request no longer needs the slot; a draining slot without pins is emptied."""
        self.slots.unpin(slot_id)
        self._finish_drain(slot_id)

    def keep(self, digest: str, *, is_kept: bool) -> None:
        """Hold a READY slot against eviction, or let go of it."""
        slot_id = self.slots.find(digest)
        if slot_id is not None:
            self.slots.slots[slot_id].keep = is_kept

    def drop(self, digest: str) -> None:
        """Forget the digest: its slot takes no new requests and empties when the running ones have ended."""
        self._host.pop(digest, None)
        self._failures.pop(digest, None)
        if digest in self._loading:
            self._unwanted.add(digest)
        slot_id = self.slots.find(digest)
        if slot_id is not None and self.slots.slots[slot_id].state is SlotState.READY:
            self.slots.drain(slot_id)
            self._finish_drain(slot_id)

    def is_draining(self, digest: str) -> bool:
        """Whether a drop of the digest waits for its running requests, or for a load that is on its way."""
        slot_id = self.slots.find(digest)
        is_slot_draining = slot_id is not None and self.slots.slots[slot_id].state is SlotState.DRAINING
        return is_slot_draining or digest in self._unwanted

    def find_failure(self, digest: str) -> RequestError | None:
        """Why the digest cannot be loaded at the moment, or None when it may be tried."""
        failure = self._failures.get(digest)
        return failure.error if failure is not None and self._clock() < failure.retry_at else None

    def poll(self) -> list[str]:
        """Take in finished loads; returns the digests that failed, whose waiting requests must be told."""
        failed = []
        for result in self._loader.take_finished():
            self._loading.discard(result.digest)
            if isinstance(result, PackedAdapter):
                self._admit(result)
                self._on_loaded(result.facts)
            else:
                self._note_failure(result)
                self._on_loaded(result)
                failed.append(result.digest)
        return failed

    def check_integrity(self) -> None:
        """Assert that a digest is in one stage of its way and that the caps hold."""
        self.slots.check_integrity()
        assert self._loading.isdisjoint(self._host)
        # the newest is taken in before a slot lets go of another
        assert len(self._host) <= max(self._max_host, len(self.slots.slots) + 1)

    def _bind(self, digest: str) -> int | None:
        slot_id = self.slots.try_assign(digest)
        if slot_id is None:
            return None
        self._host.move_to_end(digest)
        self._bank.bind(slot_id, self._host[digest])
        self.slots.mark_ready(slot_id)
        return slot_id

    def _admit(self, adapter: PackedAdapter) -> None:
        self._failures.pop(adapter.digest, None)
        if adapter.digest in self._unwanted:
            self._unwanted.discard(adapter.digest)
            return
        self._host[adapter.digest] = adapter
        self._trim_host()

    def _trim_host(self) -> None:
        """Drop the least recently used adapters beyond the cap; never the newest, a slot's, or a waiting request's."""
        kept = {*self._wanted, next(reversed(self._host))}
        candidates = [digest for digest in self._host if digest not in kept and self.slots.find(digest) is None]
        for digest in candidates[: max(0, len(self._host) - self._max_host)]:
            del self._host[digest]
            self.num_host_evictions += 1

    def _note_failure(self, failed: LoadFailed) -> None:
        self._unwanted.discard(failed.digest)
        previous = self._failures.get(failed.digest)
        num_failures = previous.num_failures + 1 if previous else 1
        wait_s = min(_MAX_BACKOFF_S, 2.0 ** (num_failures - 1))
        kind = DigestMismatchError if failed.is_content else LoadFailedError
        self._failures[failed.digest] = Failure(kind(failed.message), num_failures, self._clock() + wait_s)

    def _finish_drain(self, slot_id: int) -> None:
        slot = self.slots.slots[slot_id]
        if slot.state is SlotState.DRAINING and slot.num_pins == 0:
            self.slots.release(slot_id)
            self._bank.clear(slot_id)
