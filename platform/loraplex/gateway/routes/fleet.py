"""/api/v1/fleet: the engines, what is wanted of them, and where the two differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import Request, Router, get

from loraplex.fleet.desired import Assignment, PinGoal, assign_pins
from loraplex.fleet.difference import read_pinned
from loraplex.fleet.fleet import Fleet
from loraplex.fleet.pools import Pool
from loraplex.fleet.reconciler import Done, Open, Reconciler
from loraplex.fleet.view import FleetView, Replica
from loraplex.gateway.paging import read_query, show_time
from loraplex.gateway.permission import require_platform


def build_fleet_router(fleet: Fleet, reconciler: Reconciler) -> Router:
    """Return the route over what both know."""

    @get("/fleet")
    async def show_fleet(request: Request[Any, Any, Any]) -> dict[str, Any]:
        require_platform(request)
        read_query(request, ())
        view, goals, ejected = fleet.view, reconciler.desired.goals, fleet.health.find_ejected()
        assignment = assign_pins(goals, view)
        return {
            "data": [_show_replica(replica, replica.url not in ejected) for replica in view.replicas],
            "next_cursor": None,
            "desired": [_show_pool(pool, goals, assignment, view) for pool in fleet.pools],
            "differences": [_show_open(found) for found in reconciler.open],
            "repairs": [_show_done(done) for done in reversed(reconciler.recent)],
        }

    return Router("/api/v1", route_handlers=[show_fleet])


def _show_replica(replica: Replica, is_trusted: bool) -> dict[str, Any]:
    return {
        "replica": replica.name,
        "url": replica.url,
        "pool": replica.pool,
        "base": replica.base or None,
        "model": replica.model,
        "serves": replica.problem is None,
        "problem": replica.problem,
        "trusted": is_trusted,
        "pinned": sorted(read_pinned(replica)),
        "state": replica.state,
    }


def _show_pool(pool: Pool, goals: Sequence[PinGoal], assignment: Assignment, view: FleetView) -> dict[str, Any]:
    return {
        "pool": pool.name,
        "base": pool.base or None,
        "model": pool.model,
        "engines": list(pool.engines),
        "pins": [_show_goal(goal, assignment, view) for goal in goals if goal.pool == pool.name],
    }


def _show_goal(goal: PinGoal, assignment: Assignment, view: FleetView) -> dict[str, Any]:
    """A pin with what it means now, and the replicas that are to hold that."""
    digests = {content.digest for content in goal.contents}
    return {
        "model": goal.model,
        "copies": goal.copies,
        "problem": goal.problem,
        "versions": [{"model": content.name, "digest": content.digest} for content in goal.contents],
        "replicas": [
            replica.name
            for replica in view.replicas
            if replica.pool == goal.pool and digests & assignment.url_to_contents.get(replica.url, {}).keys()
        ],
    }


def _show_open(found: Open) -> dict[str, Any]:
    difference = found.difference
    return {
        "kind": difference.kind,
        "subject": difference.subject,
        "digest": difference.digest if difference.url else None,
        "desired": difference.desired,
        "actual": difference.actual,
        "since": show_time(found.since),
        "is_repaired_by": "operator" if difference.repair is None else "platform",
        "attempts": found.num_attempts,
        "problem": found.problem,
    }


def _show_done(done: Done) -> dict[str, Any]:
    return {
        "at": show_time(done.at),
        "kind": done.kind,
        "subject": done.subject,
        "digest": done.digest,
        "action": f"fleet.{done.action}",
        "took_s": done.took_s,
    }
