"""What is held against the replicas of a pool for one full model, and how one of them is chosen."""

from __future__ import annotations

from typing import Any

from loraplex.fleet.placement import find_able
from loraplex.fleet.view import FleetView, choose_full, read_full_replica, read_replica

DIGEST = "sha256:" + "1" * 64
OTHER = "sha256:" + "2" * 64


def state(**changes: Any) -> dict[str, Any]:
    model = {"name": "team-x-full", "fingerprint": "f", "digest": DIGEST}
    return {"is_ready": True, "running": 2, "waiting": 1, "model": model, **changes}


def problem(*registered: str, pool_model: str = "team-x-full", **changes: Any) -> str | None:
    return read_full_replica("http://a", "full", pool_model, state(**changes), registered).problem


def test_a_replica_of_a_full_model_serves_exactly_what_is_registered() -> None:
    assert problem(DIGEST) is None
    assert problem(OTHER, DIGEST) is None
    assert problem() is None
    assert f"digest {DIGEST}, expected {OTHER}" in (problem(OTHER) or "")
    assert "digest None" in (problem(DIGEST, model={"name": "team-x-full", "digest": ""}) or "")
    assert "it serves team-x-full, and its pool is for the full model other" in (problem(pool_model="other") or "")
    assert "it serves None" in (problem(model=None) or "")
    assert problem(is_draining=True) == "it is draining"
    assert problem(is_ready=False) == "it is starting"


def test_a_full_model_is_asked_of_its_pool_and_nothing_else_is() -> None:
    full = read_full_replica("http://full", "full", "team-x-full", state(), ())
    busy = read_full_replica("http://busy", "full", "team-x-full", state(running=9), ())
    alien = read_full_replica("http://alien", "other", "team-x-full", state(running=0), ())
    down = read_full_replica("http://down", "full", "team-x-full", state(is_ready=False), ())
    base = read_replica("http://base", "full", "base", state(), "f")
    view = FleetView((busy, alien, down, base, full))
    assert choose_full(view, "full", DIGEST, {}) == full
    assert choose_full(view, "full", DIGEST, {"http://full": 99}) == busy
    assert choose_full(view, "full", DIGEST, {}, ["http://full", "http://busy"]) is None
    assert choose_full(view, "full", OTHER, {}) is None
    assert choose_full(view, "none", DIGEST, {}) is None
    assert find_able("", 0, FleetView((full, busy))) == []
