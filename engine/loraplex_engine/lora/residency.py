"""Which adapters are where. `Residency` moves digests from the loader to host memory to slots, on demand.

It is the only caller of `SlotTable`, the loader and the bank. It knows digests and how many requests hold each, neither
requests nor tensors. A load goes: asked for -> loading -> host memory -> slot. Only the last step needs a slot: a slow
download holds none. A dropped digest goes the moment that no request holds it, from wherever it is.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Container, Iterable
from typing import Protocol

from loraplex_engine.errors import RequestError
from loraplex_engine.lora.health import AdapterHealth
from loraplex_engine.lora.packed import ALIGNMENT, LoadDone, LoadFailed, PackedAdapter
from loraplex_engine.slots.table import SlotState, SlotTable

_DROP_MEMORY_S = 60.0
"""A request that was on its way when its digest was dropped is served, but the digest does not stay for it."""
_SMOOTHING = 0.2
MAX_ON_THE_WAY = 6
"""Loads for waiting requests: the four that the loader works on, and enough that it need not wait for the next step."""
_log = logging.getLogger(__name__)


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
        self._loading: dict[str, float] = {}
        self._wanted: tuple[str, ...] = ()
        self._holds: Counter[str] = Counter()
        self._leaving: set[str] = set()
        self._unbound: list[str] = []
        self._dropped_until: dict[str, float] = {}
        self._disk = (0, 0)
        self.health = AdapterHealth(clock)
        self.num_host_evictions = 0
        self.num_disk_evictions = 0
        self.num_binds = 0
        self.bind_s = 0.0
        """Seconds that putting an adapter into a slot takes lately; the steps stand still for them."""
        self.load_s = 0.0
        """Seconds that a load into host memory takes lately, beside the steps."""

    @property
    def host_digests(self) -> tuple[str, ...]:
        """Digests in host memory, least recently used first."""
        return tuple(self._host)

    @property
    def loading_digests(self) -> tuple[str, ...]:
        """Digests on their way to host memory."""
        return tuple(sorted(self._loading))

    @property
    def oldest_load_s(self) -> float:
        """For how long the oldest load has been on its way, seconds; 0 without one."""
        return self._clock() - min(self._loading.values()) if self._loading else 0.0

    @property
    def held_digests(self) -> Iterable[str]:
        """Digests that requests hold."""
        return self._holds

    def is_in_host(self, digest: str) -> bool:
        """Whether nothing but a slot is missing."""
        return digest in self._host

    @property
    def tier_to_adapters(self) -> dict[str, int]:
        """Adapters in slots, in host memory and, as of the last load, in the disk cache."""
        in_slots = sum(slot.digest is not None for slot in self.slots.slots)
        return {"slot": in_slots, "host": len(self._host), "disk": self._disk[0]}

    @property
    def tier_to_bytes(self) -> dict[str, int]:
        """Bytes of those; on the CPU a slot uses the host's bytes."""
        in_slots = [self._host[slot.digest] for slot in self.slots.slots if slot.digest is not None]
        return {
            "slot": sum(adapter.facts.num_bytes for adapter in in_slots),
            "host": sum(adapter.facts.num_bytes for adapter in self._host.values()),
            "disk": self._disk[1],
        }

    @property
    def tier_to_evictions(self) -> dict[str, int]:
        """Adapters that were pushed out by others so far."""
        return {
            "slot": self.slots.num_evictions,
            "host": self.num_host_evictions,
            "disk": self.num_disk_evictions,
        }

    def hold(self, digest: str) -> None:
        """A request for the digest has come; what it needs is not forgotten before it lets go."""
        self._holds[digest] += 1
        if self._clock() < self._dropped_until.get(digest, 0.0):
            self._leave(digest)

    def let_go(self, digest: str) -> None:
        """A request for the digest has ended, after `unpin` if it ran; the last one ends a drop."""
        assert self._holds[digest] > 0
        self._holds[digest] -= 1
        if self._holds[digest] == 0:
            del self._holds[digest]
            self._finish_drop(digest)

    def facts(self, digest: str) -> LoadDone:
        """What the loader found out about a digest in host memory."""
        return self._host[digest].facts

    def try_pin(self, digest: str, protected: Container[str | None] = ()) -> int | None:
        """Pin the digest's slot for a request; None when it is not ready yet."""
        slot_id = self.try_make_ready(digest, protected)
        if slot_id is not None:
            self.slots.pin(slot_id)
        return slot_id

    def try_make_ready(self, digest: str, protected: Container[str | None] = ()) -> int | None:
        """Slot of the digest if it is ready or can be made so now, else None; never starts a load.

        No slot is taken from a protected digest.
        """
        slot_id = self.slots.find(digest)
        if slot_id is not None:
            return slot_id if self.slots.slots[slot_id].answers else None
        return self._bind(digest, protected) if digest in self._host else None

    def want(self, digests: Collection[str]) -> None:
        """Load ahead for waiting requests, in the order of the digests, which may be another one at the next step.

        Only as many as host memory can keep beside the slots' own are loaded, and those are not pushed out, so that
        a long queue of adapters never makes loads undo each other. Only a few are on their way at once: the loader
        keeps to the order in which it got them, and whoever comes first by then would wait behind all of them.
        """
        if not digests:
            self._wanted = ()
            return
        absent = [digest for digest in dict.fromkeys(digests) if self.slots.find(digest) is None]
        num_held = sum(slot.digest is not None for slot in self.slots.slots)
        self._wanted = tuple(absent[: max(1, self._max_host - num_held)])
        for digest in self._wanted:
            if len(self._loading) >= MAX_ON_THE_WAY:
                break
            self.prefetch(digest)

    def prefetch(self, digest: str) -> None:
        """Start to bring a digest to host memory unless it is there, on its way, or lately failed."""
        if digest in self._host or digest in self._loading or self.find_failure(digest) is not None:
            return
        self._loading[digest] = self._clock()
        self._loader.start(digest)

    def unpin(self, slot_id: int) -> None:
        """A running request no longer needs the slot."""
        self.slots.unpin(slot_id)

    def keep(self, digest: str, *, is_kept: bool) -> None:
        """Hold a READY slot against eviction, or let go of it."""
        slot_id = self.slots.find(digest)
        if slot_id is not None and self.slots.slots[slot_id].state is SlotState.READY:
            self.slots.slots[slot_id].keep = is_kept

    def welcome(self, digest: str, *, forgives: bool = True) -> None:
        """Forget that the digest was dropped, failed to load or was quarantined: somebody asks for it by name.

        Without `forgives` only that it was dropped: whoever asks again and again would hide what is wrong with it.
        """
        if forgives:
            self.health.forgive(digest)
        self._dropped_until.pop(digest, None)
        self._leaving.discard(digest)
        slot_id = self.slots.find(digest)
        if slot_id is not None and self.slots.slots[slot_id].state is SlotState.DRAINING:
            self.slots.revive(slot_id)

    def drop(self, digest: str) -> None:
        """Forget the digest, and give back all that it has when the requests that came for it have ended."""
        self.health.forgive(digest)
        now = self._clock()
        self._dropped_until = {known: until for known, until in self._dropped_until.items() if until > now}
        self._dropped_until[digest] = now + _DROP_MEMORY_S
        self._leave(digest)
        self._finish_drop(digest)

    def is_draining(self, digest: str) -> bool:
        """Whether a drop of the digest waits for requests, or for a load that is on its way."""
        return digest in self._leaving

    def find_failure(self, digest: str) -> RequestError | None:
        """Why the digest is not loaded or served at the moment, or None when it may be."""
        return self.health.find_refusal(digest)

    def spoil(self, digest: str) -> bool:
        """Put other finite numbers where the adapter's lie, in its slot too, for tests; False if it is not here."""
        adapter = self._host.get(digest)
        if adapter is None:
            return False
        # by a line of the packed form: each matrix keeps its size, and none its place
        content = adapter.buffer[:]
        adapter.buffer[:] = content[ALIGNMENT:] + content[:ALIGNMENT]
        return True

    def poll(self) -> list[str]:
        """Take in finished loads; returns the digests that failed, also on their way to a slot; tell their requests."""
        failed, self._unbound = self._unbound, []
        for result in self._loader.take_finished():
            self._loading.pop(result.digest, None)
            if isinstance(result, PackedAdapter):
                self._admit(result)
                self._on_loaded(result.facts)
            else:
                self.health.note_failure(result)
                self._on_loaded(result)
                failed.append(result.digest)
            self._finish_drop(result.digest)
        return failed

    def check_integrity(self) -> None:
        """Assert that a digest is in one stage of its way and that the caps hold."""
        self.slots.check_integrity()
        assert self._loading.keys().isdisjoint(self._host)
        assert all(slot.digest in self._host for slot in self.slots.slots if slot.digest is not None)
        assert all(count > 0 for count in self._holds.values())
        assert all(digest in self._holds or digest in self._loading for digest in self._leaving)
        for slot in self.slots.slots:
            assert slot.digest is None or slot.num_pins <= self._holds[slot.digest]
        # the newest is taken in before a slot lets go of another
        assert len(self._host) <= max(self._max_host, len(self.slots.slots) + 1)

    def _bind(self, digest: str, protected: Container[str | None]) -> int | None:
        slot_id = self.slots.try_assign(digest, protected)
        if slot_id is None:
            return None
        self._host.move_to_end(digest)
        started_at = self._clock()
        try:
            self._bank.bind(slot_id, self._host[digest])
        except Exception:  # noqa: BLE001 - whatever it was, it hurts this adapter alone
            _log.exception("%s could not be put into slot %d", digest, slot_id)
            self._give_up(digest, slot_id)
            return None
        now = self._clock()
        self.bind_s = _smooth(self.bind_s, now - started_at)
        self.num_binds += 1
        self.slots.mark_ready(slot_id, now)
        if digest in self._leaving:
            self.slots.drain(slot_id)
        return slot_id

    def _give_up(self, digest: str, slot_id: int) -> None:
        """Let go of an adapter that its slot did not take, as if its load had failed."""
        self._bank.clear(slot_id)
        self.slots.release(slot_id)
        del self._host[digest]
        message = "The adapter could not be put into its slot."
        failed = LoadFailed(digest, "bind", "adapter_loading", message, is_content=False)
        self.health.note_failure(failed)
        self._on_loaded(failed)
        self._unbound.append(digest)

    def _admit(self, adapter: PackedAdapter) -> None:
        self.health.note_loaded(adapter.digest)
        self.load_s = _smooth(self.load_s, adapter.facts.fetch_s + adapter.facts.verify_s + adapter.facts.pack_s)
        self._disk = (adapter.facts.disk_adapters, adapter.facts.disk_bytes)
        self.num_disk_evictions += adapter.facts.disk_evictions
        self._host[adapter.digest] = adapter
        self._trim_host()

    def _trim_host(self) -> None:
        """Drop the least recently used adapters beyond the cap; never a slot's, nor what is waited for and has room.

        Slots and what is waited for may leave no room for the newest, whose request has gone or waits at the end.
        """
        excess = len(self._host) - self._max_host
        if excess <= 0:
            return
        loose = [digest for digest in self._host if self.slots.find(digest) is None]
        room = max(1, self._max_host - (len(self._host) - len(loose)))
        wanted = [digest for digest in self._wanted if digest in loose] or [next(reversed(self._host))]
        candidates = [digest for digest in loose if digest not in wanted[:room]]
        for digest in candidates[:excess]:
            del self._host[digest]
            self.num_host_evictions += 1

    def _leave(self, digest: str) -> None:
        self._leaving.add(digest)
        slot_id = self.slots.find(digest)
        if slot_id is not None and self.slots.slots[slot_id].state is SlotState.READY:
            self.slots.drain(slot_id)

    def _finish_drop(self, digest: str) -> None:
        if digest not in self._leaving or digest in self._holds or digest in self._loading:
            return
        self._leaving.discard(digest)
        slot_id = self.slots.find(digest)
        if slot_id is not None:
            self.slots.release(slot_id)
            self._bank.clear(slot_id)
        self._host.pop(digest, None)


def _smooth(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + _SMOOTHING * (value - mean)
