"""The fleet as pages show it: a row for each replica, and what is not as it should be. Pure over what both know."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from loraplex.fleet.difference import read_pinned
from loraplex.fleet.fleet import Fleet
from loraplex.fleet.reconciler import Reconciler
from loraplex.fleet.view import Replica


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """One replica; None is what it does not say."""

    name: str
    pool: str
    model: str
    state: str
    problem: str | None
    num_waiting: int
    num_running: int
    max_running: int | None
    kv_usage: float | None
    slots: int
    slots_used: int
    num_pinned: int
    advice: list[str]


class DifferenceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be; `is_repaired` says that the platform is at it."""

    kind: str
    subject: str
    desired: str
    actual: str
    since: datetime
    is_repaired: bool
    num_attempts: int
    problem: str | None


class FleetTable(msgspec.Struct, frozen=True):
    """Both lists."""

    replicas: list[ReplicaRow]
    differences: list[DifferenceRow]


def describe_fleet(fleet: Fleet, reconciler: Reconciler) -> FleetTable:
    """Return what is known of the fleet now."""
    ejected = fleet.health.find_ejected()
    replicas = [_describe(replica, is_trusted=replica.url not in ejected) for replica in fleet.view.replicas]
    differences = [
        DifferenceRow(
            kind=one.difference.kind,
            subject=one.difference.subject,
            desired=one.difference.desired,
            actual=one.difference.actual,
            since=one.since,
            is_repaired=one.difference.repair is not None,
            num_attempts=one.num_attempts,
            problem=one.problem,
        )
        for one in reconciler.open
    ]
    return FleetTable(replicas, differences)


def _describe(replica: Replica, *, is_trusted: bool) -> ReplicaRow:
    state = replica.state
    return ReplicaRow(
        name=replica.name,
        pool=replica.pool,
        model=replica.model or replica.base,
        state=_find_state(replica, is_trusted=is_trusted),
        problem=replica.problem or (None if is_trusted else "requests that went there failed; it is tried again soon"),
        num_waiting=replica.num_waiting,
        num_running=replica.num_running,
        max_running=replica.max_running,
        kv_usage=read_kv_usage(state),
        slots=replica.num_slots,
        slots_used=len(replica.resident),
        num_pinned=len(read_pinned(replica)),
        advice=read_texts(state, "advice"),
    )


def _find_state(replica: Replica, *, is_trusted: bool) -> str:
    if replica.state.get("is_draining"):
        return "draining"
    if replica.problem is not None:
        return "down"
    return "serves" if is_trusted else "on trial"


def read_kv_usage(state: dict[str, Any]) -> float | None:
    """The part of an engine's KV blocks that is in use, None if it does not say."""
    kv = state.get("kv")
    if not isinstance(kv, dict):
        return None
    num_blocks, num_free = kv.get("num_blocks"), kv.get("num_free")
    if not isinstance(num_blocks, int) or not isinstance(num_free, int) or num_blocks <= 0:
        return None
    return 1 - num_free / num_blocks


def read_texts(state: dict[str, Any], name: str) -> list[str]:
    """Sentences that an engine says; whatever else stands there is none."""
    found = state.get(name)
    return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []
