"""What is wanted of the fleet: which adapters are always loaded, and which replica of a pool holds which of them. Pure.

Pins come from the operator (`LORAPLEX_POOLS`); which content a name means is looked up anew at every look.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum

import msgspec

from loraplex.fleet.placement import order_homes
from loraplex.fleet.view import FleetView, Replica


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter version that a name means: its full name, what engines know it by, and what serves it.

    Only replicas whose base has `weights` may hold it; None: any may.
    """

    name: str
    digest: str
    rank: int
    weights: str | None = None


class PinGoal(msgspec.Struct, frozen=True, kw_only=True):
    """A name that a pool pins, and what it means now; `problem` says why it means nothing that can be pinned."""

    pool: str
    model: str
    copies: int | None
    contents: tuple[Content, ...] = ()
    problem: str | None = None


class BrokenAlias(msgspec.Struct, frozen=True, kw_only=True):
    """An alias of a living adapter that leads to a version which is not there any more; `targets` says how."""

    tenant_id: str
    tenant: str
    adapter: str
    alias: str
    targets: str

    @property
    def name(self) -> str:
        """`TENANT/ADAPTER@ALIAS`."""
        return f"{self.tenant}/{self.adapter}@{self.alias}"


class Naming(Enum):
    """How content is named: it can be called or released, only restored, or by nothing at all."""

    CALLABLE = "callable"
    RETIRED = "retired"
    NAMELESS = "nameless"


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted, as of one moment. `find_naming` takes a base and a digest."""

    goals: tuple[PinGoal, ...] = ()
    broken: tuple[BrokenAlias, ...] = ()
    find_naming: Callable[[str, str], Naming] = lambda base, digest: Naming.CALLABLE  # noqa: ARG005 - tests without names


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """A pinned adapter that is on fewer replicas than it should be, because no other one can take it."""

    goal: PinGoal
    content: Content
    num_placed: int


class Assignment(msgspec.Struct, frozen=True):
    """Which replica, by its URL, holds which content by its digest; and what found no place."""

    url_to_contents: dict[str, dict[str, Content]]
    shortages: tuple[Shortage, ...] = ()


def assign_pins(goals: Sequence[PinGoal], view: FleetView) -> Assignment:
    """Return where each pinned adapter is to be.

    Each replica keeps one slot that nothing is pinned to, for all other adapters. A digest prefers the same replicas
    whatever others there are, so one that goes or comes moves only its own. Earlier goals come first.
    """
    found: defaultdict[str, dict[str, Content]] = defaultdict(dict)
    shortages: list[Shortage] = []
    for goal in goals:
        for content in goal.contents:
            willing = [replica for replica in view.replicas if _may_hold(replica, goal.pool, content)]
            wanted = len(willing) if goal.copies is None else goal.copies
            homes = [
                replica
                for replica in order_homes(content.digest, willing)
                if content.digest in found[replica.url] or len(found[replica.url]) < replica.num_slots - 1
            ][:wanted]
            for replica in homes:
                found[replica.url][content.digest] = content
            if len(homes) < max(wanted, 1):
                shortages.append(Shortage(goal=goal, content=content, num_placed=len(homes)))
    return Assignment({url: contents for url, contents in found.items() if contents}, tuple(shortages))


def _may_hold(replica: Replica, pool: str, content: Content) -> bool:
    """Whether a replica serves and has nothing against the adapter."""
    failure = replica.failed.get(content.digest)
    return (
        replica.pool == pool
        and replica.model is None
        and replica.problem is None
        and replica.takes(content.rank, content.weights)
        and content.digest not in replica.quarantined
        and not (failure is not None and failure.is_final)
    )
