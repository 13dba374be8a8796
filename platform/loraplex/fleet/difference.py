"""Where the fleet is not as it should be, found by comparing what is wanted with what replicas say. Pure.

Each kind of difference has at most one repair, and says in words what should be and what is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum

import msgspec

from loraplex.fleet.desired import Assignment, BrokenAlias, Content, Desired, Naming, assign_pins
from loraplex.fleet.view import FleetView, Replica

_SHORT_DIGEST = 19
_MAX_EXTRA = 64
"""Of one replica at a time: more than it has room for is nonsense, and is told a little at a time."""


class Repair(Enum):
    """What is done about a difference. The value is the event that tells of it, in the past tense."""

    LOAD = "adapter_loaded"
    PIN = "adapter_pinned"
    UNPIN = "adapter_unpinned"
    DROP = "adapter_dropped"
    LOAD_AGAIN = "load_retried"
    MEND_ALIAS = "alias_mended"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be.

    `kind` is one of KINDS, `subject` a replica, an alias or a pool by its name. `repair` None: only an operator can do
    something about it.
    """

    kind: str
    subject: str
    desired: str
    actual: str
    url: str = ""
    digest: str | None = None
    repair: Repair | None = None
    alias: BrokenAlias | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """The same for the same difference at the next look."""
        return self.kind, self.url or self.subject, self.digest or ""


KINDS = (
    "replica_down",
    "replica_refused",
    "adapter_missing",
    "adapter_extra",
    "pin_missing",
    "pin_extra",
    "load_given_up",
    "alias_broken",
    "pin_unknown",
    "pin_unplaced",
)


def find_differences(desired: Desired, view: FleetView, is_due: Callable[[str, str], bool]) -> list[Difference]:
    """Return all differences.

    Args:
        desired: What is wanted.
        view: What replicas last said.
        is_due: Whether engines have had their time to keep content of a base that nothing can be called by.
    """
    assignment = assign_pins(desired.goals, view)
    found = [*_judge_goals(desired, assignment), *map(_judge_alias, desired.broken)]
    for replica in view.replicas:
        if replica.problem is not None:
            found.append(_judge_replica(replica, replica.problem))
        elif replica.model is None:
            wanted = assignment.url_to_contents.get(replica.url, {})
            found += _compare_pins(replica, wanted, desired)
            found += _find_extra(replica, desired, is_due)
            found += _find_given_up(replica, view, desired)
    return found


def read_pinned(replica: Replica) -> frozenset[str]:
    """Return the digests that stay in the slots of a replica whatever else is asked for."""
    slots = replica.state.get("slots")
    found = slots if isinstance(slots, list) else []
    return frozenset(
        slot["digest"]
        for slot in found
        if isinstance(slot, dict) and slot.get("keep") and isinstance(slot.get("digest"), str)
    )


def _judge_replica(replica: Replica, problem: str) -> Difference:
    """A replica that is ready and gets no traffic says something of itself that is not what is registered."""
    is_refused = replica.state.get("is_ready") is True
    return Difference(
        kind="replica_refused" if is_refused else "replica_down",
        subject=replica.name,
        url=replica.url,
        desired=f"it serves {replica.model or replica.base}",
        actual=problem,
    )


def _judge_alias(broken: BrokenAlias) -> Difference:
    return Difference(
        kind="alias_broken",
        subject=broken.name,
        desired="it leads to versions that are there",
        actual=broken.targets,
        repair=Repair.MEND_ALIAS,
        alias=broken,
    )


def _judge_goals(desired: Desired, assignment: Assignment) -> Iterator[Difference]:
    for goal in desired.goals:
        if goal.problem is not None:
            yield Difference(
                kind="pin_unknown",
                subject=goal.pool,
                digest=goal.model,
                desired=f"{goal.model} is always loaded",
                actual=goal.problem,
            )
    for short in assignment.shortages:
        copies = "every replica" if short.goal.copies is None else f"{short.goal.copies} replicas"
        yield Difference(
            kind="pin_unplaced",
            subject=short.goal.pool,
            digest=short.content.digest,
            desired=f"{short.content.name} is always loaded on {copies}",
            actual=f"only {short.num_placed} can take it: the others do not serve, refuse it or have no slot left",
        )


def _compare_pins(replica: Replica, wanted: Mapping[str, Content], desired: Desired) -> Iterator[Difference]:
    pinned = read_pinned(replica)
    for digest, content in wanted.items():
        if digest not in replica.resident:
            yield _at(replica, "adapter_missing", digest, f"it holds {content.name}", "it does not", Repair.LOAD)
        elif digest not in pinned:
            should, does = f"{content.name} is pinned to its slot", "others may push it out"
            yield _at(replica, "pin_missing", digest, should, does, Repair.PIN)
    for digest in sorted(pinned - wanted.keys()):
        if desired.find_naming(replica.base, digest) is Naming.CALLABLE:
            should, does = "others may push it out", "it is pinned to its slot"
            yield _at(replica, "pin_extra", digest, should, does, Repair.UNPIN)


def _find_extra(replica: Replica, desired: Desired, is_due: Callable[[str, str], bool]) -> Iterator[Difference]:
    held = sorted(replica.resident | replica.in_memory)
    extra = [digest for digest in held if desired.find_naming(replica.base, digest) is not Naming.CALLABLE]
    for digest in extra[:_MAX_EXTRA]:
        if is_due(replica.base, digest):
            should, does = "it holds only what can be called", f"it holds {_short(digest)}, which no name means"
            yield _at(replica, "adapter_extra", digest, should, does, Repair.DROP)


def _find_given_up(replica: Replica, view: FleetView, desired: Desired) -> Iterator[Difference]:
    """What one replica could not load for the sake of its bytes, though another has loaded them: they are fine."""
    for digest, load in replica.failed.items():
        if not load.is_final or desired.find_naming(replica.base, digest) is not Naming.CALLABLE:
            continue
        holder = next((other for other in view.replicas if _holds(other, replica.base, digest)), None)
        if holder is not None:
            should, does = f"it loads {_short(digest)}, as {holder.name} did", f"it gave up: {load.reason}"
            yield _at(replica, "load_given_up", digest, should, does, Repair.LOAD_AGAIN)


def _holds(replica: Replica, base: str, digest: str) -> bool:
    return replica.base == base and replica.problem is None and digest in replica.resident


def _at(replica: Replica, kind: str, digest: str, desired: str, actual: str, repair: Repair) -> Difference:
    return Difference(
        kind=kind,
        subject=replica.name,
        url=replica.url,
        digest=digest,
        desired=desired,
        actual=actual,
        repair=repair,
    )


def _short(digest: str) -> str:
    return digest[:_SHORT_DIGEST]
