"""What is known of all replicas at one moment, and the choice among them: pure data and pure functions."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from loraplex_registry.wire.protocol import find_mismatch

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

    `max_lora_rank` is the highest rank that it takes, and `weights_digest` names its base's weights; None if it does
    not say. `model` is the full model that its pool is for; then `base` is empty, no base or adapter is ever asked of
    it, and `model_digest` is what it says of its files. `loading` are digests on their way to it; `max_running` is how
    many requests it computes at once, None if it does not say; `num_own` is how many requests this gateway had there
    when it described itself.
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
    model: str | None = None
    model_digest: str | None = None
    num_slots: int = 0
    loading: frozenset[str] = frozenset()
    max_running: int | None = None
    num_own: int = 0
    weights_digest: str | None = None

    @property
    def name(self) -> str:
        """What clients see of it: its pool and a short hash of its URL, never the address itself."""
        return f"{self.pool}-{hashlib.sha256(self.url.encode()).hexdigest()[:6]}"

    def takes(self, rank: int, weights: str | None = None) -> bool:
        """Whether adapters of that rank are served here that only those weights may serve (None: any)."""
        is_high = self.max_lora_rank is not None and rank > self.max_lora_rank
        return not is_high and self.has_weights(weights)

    def has_weights(self, weights: str | None) -> bool:
        """Whether it says of no other weights that they are its base's."""
        return weights is None or self.weights_digest in (None, weights)

    @property
    def load(self) -> int:
        """Requests that it had when it was last asked."""
        return self.num_waiting + self.num_running

    @property
    def num_foreign(self) -> int:
        """Those of them that others had sent."""
        return max(0, self.load - self.num_own)


class FleetView(msgspec.Struct, frozen=True):
    """All replicas."""

    replicas: tuple[Replica, ...] = ()


def choose_full(
    view: FleetView, pool: str, digest: str, in_flight: Mapping[str, int], exclude: Collection[str] = ()
) -> Replica | None:
    """Return the least loaded replica of a pool that serves exactly the full model `digest`, None if none does.

    Args:
        view: What is known.
        pool: The pool's name.
        digest: The full version's.
        in_flight: Requests that this gateway has at each URL now.
        exclude: URLs that have failed this request already.
    """
    able = [
        replica
        for replica in view.replicas
        if replica.pool == pool and replica.model is not None and replica.problem is None
        if replica.model_digest == digest and replica.url not in exclude
    ]
    return min(able, key=lambda one: (max(one.load, in_flight.get(one.url, 0)), one.url), default=None)


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


def read_replica(url: str, pool: str, base: str, state: dict[str, Any], fingerprint: str | None) -> Replica:
    """Return the replica that answered `state`, judged against the base's registered `fingerprint`.

    Another fingerprint means another model or tokenizer: its answers would be wrong, so it gets no traffic.
    """
    facts = _facts(state)
    reported, max_lora_rank = facts.get("fingerprint"), facts.get("max_lora_rank")
    weights = facts.get("weights_digest")
    return Replica(
        url=url,
        pool=pool,
        base=base,
        problem=_find_problem(base, reported, fingerprint, state),
        resident=_resident(state),
        in_memory=_digests(state, "host"),
        failed=_read(state, "failed", dict[str, FailedLoad]),
        quarantined=_read(state, "quarantined", dict[str, HarmfulAdapter]),
        max_lora_rank=max_lora_rank if isinstance(max_lora_rank, int) else None,
        num_waiting=_count(state, "waiting"),
        num_running=_count(state, "running"),
        state=state,
        num_slots=len(_slots(state)),
        loading=_digests(state, "loading"),
        max_running=_count(state, "max_running") or None,
        weights_digest=weights if isinstance(weights, str) and weights else None,
    )


def read_full_replica(url: str, pool: str, model: str, state: dict[str, Any], registered: Collection[str]) -> Replica:
    """Return the replica of a pool for one full model that answered `state`.

    It must say that it serves `model`, from the very files of one of the versions `registered` to the pool; none may
    be yet. Others' answers would be somebody else's, so they get no traffic.
    """
    digest = _facts(state).get("digest")
    found = digest if isinstance(digest, str) and digest else None
    return Replica(
        url=url,
        pool=pool,
        base="",
        model=model,
        model_digest=found,
        problem=_find_full_problem(model, found, registered, state),
        num_waiting=_count(state, "waiting"),
        num_running=_count(state, "running"),
        state=state,
    )


def _find_full_problem(
    model: str, digest: str | None, registered: Collection[str], state: dict[str, Any]
) -> str | None:
    name = _facts(state).get("name")
    if mismatch := find_mismatch("it", state.get("protocol")):
        return mismatch
    if state.get("is_draining"):
        return "it is draining"
    if not state.get("is_ready", False):
        return "it is starting"
    if name != model:
        return f"it serves {name}, and its pool is for the full model {model}"
    if registered and digest not in registered:
        expected = " or ".join(sorted(registered))
        return f"it serves {model} with other files than those registered: digest {digest}, expected {expected}"
    return None


def _facts(state: dict[str, Any]) -> dict[str, Any]:
    """What an engine says of its model."""
    model = state.get("model")
    return model if isinstance(model, dict) else {}


def _find_problem(base: str, reported: object, expected: str | None, state: dict[str, Any]) -> str | None:
    if mismatch := find_mismatch("it", state.get("protocol")):
        return mismatch
    if state.get("is_draining"):
        return "it is draining"
    if not state.get("is_ready", False):
        return "it is starting"
    if expected is None:
        return f"the base {base} is not registered; an admin does so by `loraplex base register {base}`"
    if reported != expected:
        return f"it serves another model than the registered {base}: fingerprint {reported}, expected {expected}"
    return None


def _resident(state: dict[str, Any]) -> frozenset[str]:
    found = [slot.get("digest") for slot in _slots(state)]
    return frozenset(digest for digest in found if isinstance(digest, str))


def _slots(state: dict[str, Any]) -> list[dict[str, Any]]:
    slots = state.get("slots", [])
    return [slot for slot in slots if isinstance(slot, dict)] if isinstance(slots, list) else []


def _digests(state: dict[str, Any], name: str) -> frozenset[str]:
    found = state.get(name, [])
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
