"""What is known of all replicas at one moment, and the choice among them: pure data and pure functions."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class FailedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A digest that a replica could not load.

    `is_content` says that its bytes are to blame, not store, network or memory; `is_final` that the replica has given
    up; else it tries again in `retry_in_s` seconds when asked to.
    """

    reason: str
    code: str
    attempts: int
    is_content: bool
    is_final: bool
    retry_in_s: float | None = None


class HarmfulAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A digest that a replica has quarantined for itself after `strikes` harmed requests."""

    reason: str
    strikes: int


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as it last described itself. `problem` says why it gets no traffic, None when it does.

    `max_lora_rank` is the highest rank that it takes, None if it does not say.
    """

    url: str
    pool: str
    base: str
    problem: str | None
    resident: frozenset[str] = frozenset()
    in_memory: frozenset[str] = frozenset()
    failed: dict[str, FailedLoad] = {}
    quarantined: dict[str, HarmfulAdapter] = {}
    max_lora_rank: int | None = None
    num_waiting: int = 0
    num_running: int = 0
    state: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """What clients see of it: its pool and a short hash of its URL, never the address itself."""
        return f"{self.pool}-{hashlib.sha256(self.url.encode()).hexdigest()[:6]}"

    def takes(self, rank: int) -> bool:
        """Whether adapters of that rank are served here; the base itself has rank 0."""
        return self.max_lora_rank is None or rank <= self.max_lora_rank

    @property
    def load(self) -> int:
        """Requests that it had when it was last asked."""
        return self.num_waiting + self.num_running


class FleetView(msgspec.Struct, frozen=True):
    """All replicas."""

    replicas: tuple[Replica, ...] = ()


def choose_replica(
    view: FleetView,
    base: str,
    digest: str | None,
    in_flight: Mapping[str, int],
    exclude: Collection[str] = (),
    *,
    rank: int = 0,
) -> Replica | None:
    """Return the replica for a request: by what it did with the adapter, then the least loaded; None if none serves.

    An adapter that one replica has quarantined goes where it is resident and well, and nowhere else: there the replica
    itself refuses it. One that failed to load goes where it is not known yet.

    Args:
        view: What is known.
        base: Served name of the base model.
        digest: The adapter version, None for the base itself, which is resident everywhere.
        in_flight: Requests that this gateway has at each URL now; fresher than the view.
        exclude: URLs that have failed this request already.
        rank: The adapter's; a replica with a lower limit cannot load it.
    """
    able = [
        replica
        for replica in view.replicas
        if replica.base == base and replica.problem is None and replica.url not in exclude and replica.takes(rank)
    ]

    def cost(replica: Replica) -> tuple[int, int, str]:
        return _rank(replica, digest), max(replica.load, in_flight.get(replica.url, 0)), replica.url

    return min(able, key=cost, default=None)


def find_unloadable(view: FleetView) -> dict[tuple[str, str], str]:
    """Return the digests whose bytes no replica can load, by (base, digest), with the cause.

    That is: every serving replica that tried has given up, because of the bytes. One that failed for another reason, or
    still tries, may yet load them.
    """
    reasons: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    hopeful: set[tuple[str, str]] = set()
    for replica in view.replicas:
        if replica.problem is not None:
            continue
        hopeful |= {(replica.base, digest) for digest in replica.resident | replica.in_memory}
        for digest, load in replica.failed.items():
            reasons[replica.base, digest].append(load.reason)
            if not (load.is_content and load.is_final):
                hopeful.add((replica.base, digest))
    return {key: found[0] for key, found in reasons.items() if key not in hopeful}


def _rank(replica: Replica, digest: str | None) -> int:
    """How willing a replica is to serve a digest, 0 the most."""
    if digest is None:
        return 0
    if digest in replica.quarantined:
        return 1
    if digest in replica.resident:
        return 0
    return 3 if digest in replica.failed else 2


def read_replica(url: str, pool: str, base: str, state: dict[str, Any], fingerprint: str | None) -> Replica:
    """Return the replica that answered `state`, judged against the base's registered `fingerprint`.

    Another fingerprint means another model or tokenizer: its answers would be wrong, so it gets no traffic.
    """
    model = state.get("model")
    facts: dict[str, Any] = model if isinstance(model, dict) else {}
    reported, max_lora_rank = facts.get("fingerprint"), facts.get("max_lora_rank")
    return Replica(
        url=url,
        pool=pool,
        base=base,
        problem=_find_problem(base, reported, fingerprint, state),
        resident=_resident(state),
        in_memory=_in_memory(state),
        failed=_read(state, "failed", dict[str, FailedLoad]),
        quarantined=_read(state, "quarantined", dict[str, HarmfulAdapter]),
        max_lora_rank=max_lora_rank if isinstance(max_lora_rank, int) else None,
        num_waiting=_count(state, "waiting"),
        num_running=_count(state, "running"),
        state=state,
    )


def _find_problem(base: str, reported: object, expected: str | None, state: dict[str, Any]) -> str | None:
    if state.get("is_draining"):
        return "it is draining"
    if not state.get("is_ready", False):
        return "it is starting"
    if expected is None:
        return f"the base {base} is not registered"
    if reported != expected:
        return f"it serves another model than the registered {base}: fingerprint {reported}, expected {expected}"
    return None


def _resident(state: dict[str, Any]) -> frozenset[str]:
    slots = state.get("slots", [])
    found = [slot.get("digest") for slot in slots if isinstance(slot, dict)] if isinstance(slots, list) else []
    return frozenset(digest for digest in found if isinstance(digest, str))


def _in_memory(state: dict[str, Any]) -> frozenset[str]:
    found = state.get("host", [])
    return frozenset(digest for digest in found if isinstance(digest, str)) if isinstance(found, list) else frozenset()


def _read(state: dict[str, Any], name: str, kind: type[T]) -> T:
    """What a replica says of digests; an engine of another release that says it differently says nothing."""
    try:
        return msgspec.convert(state.get(name, {}), kind)
    except msgspec.ValidationError:
        return msgspec.convert({}, kind)


def _count(state: dict[str, Any], name: str) -> int:
    value = state.get(name, 0)
    return value if isinstance(value, int) else 0
