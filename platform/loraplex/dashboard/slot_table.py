"""Which adapter sits in which slot of which engine, as engines last said; names and signs of thrash beside it. Pure.

Engines know digests. What a digest is called, and by how many, is known from the names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from loraplex.fleet.fleet import Fleet
from loraplex.fleet.view import Replica
from loraplex.gateway.names import NameIndex
from loraplex.stats.report import StatsReport
from loraplex.wire.stats import EngineStats

_MANY_SHOWN = 20


class SlotRow(msgspec.Struct, frozen=True, kw_only=True):
    """One slot: `pins` are the requests that run on it now, `is_kept` that others may not push its adapter out.

    `state` is the engine's word, or `quarantined` for what is held but not called.
    """

    number: int
    state: str
    digest: str | None
    names: Sequence[str]
    pins: int
    is_kept: bool


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """A digest that an engine could not load, or has quarantined for itself."""

    names: Sequence[str]
    digest: str
    what: str
    reason: str


class ReplicaSlots(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's slots; `in_memory` and `loading` are names of what waits outside of them.

    An engine keeps in memory what is in a slot, too; here each is in one place.

    `thrash` says in a sentence that adapters push each other out, None while they do not; then `loaded` has those that
    were loaded most, and how often.
    """

    name: str
    pool: str
    model: str
    problem: str | None
    slots: Sequence[SlotRow]
    in_memory: Sequence[str]
    num_in_memory: int
    loading: Sequence[str]
    troubles: Sequence[Trouble]
    loads: int | None
    evictions: int | None
    thrash: str | None
    loaded: Sequence[tuple[str, int]]


def describe_slots(
    fleet: Fleet, names: NameIndex, report: StatsReport, loaded: Mapping[str, Sequence[tuple[str, int]]]
) -> list[ReplicaSlots]:
    """Return all engines with their slots.

    Args:
        fleet: The engines.
        names: What digests are called.
        report: What was counted of each, by replica.
        loaded: Of those that thrash the adapters that were loaded most, and how often.
    """
    known, refused = _name_digests(names)
    counted = {row.replica: row.engines for row in report.rows}
    return [
        _describe(replica, known, refused, counted.get(replica.name), loaded.get(replica.name, ()))
        for replica in fleet.view.replicas
    ]


def _name_digests(names: NameIndex) -> tuple[dict[str, list[str]], set[str]]:
    """What digests are called, and which of them are quarantined under every name."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    served: set[str] = set()
    for adapter in names.adapters():
        for version in adapter.versions:
            found[version.digest].append(f"{adapter.tenant}/{adapter.name}@{version.number}")
            if version.state != "quarantined":
                served.add(version.digest)
    return found, found.keys() - served


def _describe(
    replica: Replica,
    known: Mapping[str, Sequence[str]],
    refused: Collection[str],
    engines: EngineStats | None,
    loaded: Sequence[tuple[str, int]],
) -> ReplicaSlots:
    slots = _read_slots(replica.state, known, {*refused, *replica.quarantined})
    outside = replica.in_memory - {slot.digest for slot in slots}
    in_memory = sorted(name for digest in outside for name in known.get(digest, (digest[:19],)))
    return ReplicaSlots(
        name=replica.name,
        pool=replica.pool,
        model=replica.model or replica.base,
        problem=replica.problem,
        slots=slots,
        in_memory=in_memory[:_MANY_SHOWN],
        num_in_memory=len(in_memory),
        loading=sorted(name for digest in replica.loading for name in known.get(digest, (digest[:19],))),
        troubles=_list_troubles(replica, known),
        loads=None if engines is None else engines.loads,
        evictions=None if engines is None else engines.evictions,
        thrash=find_thrash(replica.state, replica.num_slots, engines),
        loaded=loaded,
    )


def _read_slots(state: dict[str, Any], known: Mapping[str, Sequence[str]], refused: Collection[str]) -> list[SlotRow]:
    found = state.get("slots")
    slots = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    rows = []
    for index, slot in enumerate(slots):
        digest = slot.get("digest") if isinstance(slot.get("digest"), str) else None
        row = SlotRow(
            number=index,
            state="quarantined" if digest in refused else str(slot.get("state", "")),
            digest=digest,
            names=known.get(digest, ()) if digest else (),
            pins=_read_count(slot, "pins"),
            is_kept=slot.get("keep") is True,
        )
        rows.append(row)
    return rows


def find_thrash(state: dict[str, Any], num_slots: int, engines: EngineStats | None) -> str | None:
    """Say that adapters push each other out: more are wanted than there are slots, or each slot changed hands often."""
    schedule = state.get("slot_schedule")
    if isinstance(schedule, dict) and schedule.get("mode") == "turns":
        wanted = _read_count(schedule, "working_set")
        return (
            f"{wanted} adapters are wanted and there are {num_slots} slots: they take turns, and requests wait for them"
        )
    if engines is not None and num_slots and engines.evictions > 2 * num_slots:
        return f"{engines.evictions} adapters were pushed out of {num_slots} slots in ten minutes"
    return None


def _list_troubles(replica: Replica, known: Mapping[str, Sequence[str]]) -> list[Trouble]:
    failed = [
        Trouble(
            names=known.get(digest, ()),
            digest=digest,
            what="given up" if load.is_final else f"load failed {load.attempts} times",
            reason=load.reason,
        )
        for digest, load in replica.failed.items()
    ]
    harmful = [
        Trouble(names=known.get(digest, ()), digest=digest, what="quarantined here", reason=one.reason)
        for digest, one in replica.quarantined.items()
    ]
    return [*failed, *harmful]


def _read_count(found: dict[str, Any], name: str) -> int:
    value = found.get(name)
    return value if isinstance(value, int) else 0
