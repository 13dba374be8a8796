"""What is known of all replicas at one moment, and the choice among them: pure data and pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import msgspec


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as it last described itself. `problem` says why it gets no traffic, None when it does."""

    url: str
    pool: str
    base: str
    problem: str | None
    resident: frozenset[str] = frozenset()
    num_waiting: int = 0
    num_running: int = 0
    state: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """What clients see of it: its pool and a short hash of its URL, never the address itself."""
        return f"{self.pool}-{hashlib.sha256(self.url.encode()).hexdigest()[:6]}"

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
) -> Replica | None:
    """Return the replica for a request: where the adapter is resident, then the least loaded; None if none serves.

    Args:
        view: What is known.
        base: Served name of the base model.
        digest: The adapter version, None for the base itself, which is resident everywhere.
        in_flight: Requests that this gateway has at each URL now; fresher than the view.
        exclude: URLs that have failed this request already.
    """
    able = [
        replica
        for replica in view.replicas
        if replica.base == base and replica.problem is None and replica.url not in exclude
    ]

    def cost(replica: Replica) -> tuple[bool, int, str]:
        is_cold = digest is not None and digest not in replica.resident
        return is_cold, max(replica.load, in_flight.get(replica.url, 0)), replica.url

    return min(able, key=cost, default=None)


def read_replica(url: str, pool: str, base: str, state: dict[str, Any], fingerprint: str | None) -> Replica:
    """Return the replica that answered `state`, judged against the base's registered `fingerprint`.

    Another fingerprint means another model or tokenizer: its answers would be wrong, so it gets no traffic.
    """
    model = state.get("model")
    reported = model.get("fingerprint") if isinstance(model, dict) else None
    return Replica(
        url=url,
        pool=pool,
        base=base,
        problem=_find_problem(base, reported, fingerprint, state),
        resident=_resident(state),
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


def _count(state: dict[str, Any], name: str) -> int:
    value = state.get(name, 0)
    return value if isinstance(value, int) else 0
