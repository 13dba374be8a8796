"""What replicas say of themselves, and what follows from it for all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loraplex.fleet.view import (
    FailedLoad,
    FleetView,
    HarmfulAdapter,
    Replica,
    find_unloadable,
    read_replica,
)

DIGEST = "sha256:" + "a" * 64


def replica(url: str, *, resident: tuple[str, ...] = (), load: int = 0, **changes: Any) -> Replica:
    fields: dict[str, Any] = {
        "url": url,
        "pool": "p",
        "base": "base",
        "problem": None,
        "resident": frozenset(resident),
        "num_running": load,
    }
    return Replica(**{**fields, **changes})


def failing(url: str, *, is_content: bool = True, is_final: bool = True, **changes: Any) -> Replica:
    load = FailedLoad(reason="bad", code="c", attempts=5, is_content=is_content, is_final=is_final)
    return replica(url, failed={DIGEST: load}, **changes)


def harmed(url: str, **changes: Any) -> Replica:
    return replica(url, quarantined={DIGEST: HarmfulAdapter(reason="nan", strikes=3)}, **changes)


def test_the_rank_limit_is_what_the_engine_says() -> None:
    def read(model: object) -> Replica:
        return read_replica("http://e", "p", "base", {"is_ready": True, "model": model}, "f")

    assert read({"fingerprint": "f", "max_lora_rank": 64}).max_lora_rank == 64
    assert read({"fingerprint": "f"}).max_lora_rank is read({"max_lora_rank": "many"}).max_lora_rank is None
    assert read("nothing").problem is not None


@pytest.mark.parametrize(
    ("replicas", "is_unloadable"),
    [
        ((failing("a"),), True),
        ((failing("a"), failing("b")), True),
        ((failing("a"), replica("untried")), True),
        ((failing("a"), failing("down", is_final=False, problem="it cannot be reached")), True),
        ((failing("a", is_final=False),), False),
        ((failing("a", is_content=False),), False),
        ((failing("a"), failing("b", is_final=False)), False),
        ((failing("a"), failing("b", is_content=False)), False),
        ((failing("a"), replica("b", resident=(DIGEST,))), False),
        ((failing("a"), replica("b", in_memory=frozenset({DIGEST}))), False),
        ((failing("down", problem="it cannot be reached"),), False),
        ((harmed("a"),), False),
        ((), False),
    ],
)
def test_unloadable_is_what_every_replica_that_tried_gave_up_for_its_bytes(
    replicas: tuple[Replica, ...], is_unloadable: bool
) -> None:
    assert find_unloadable(FleetView(replicas)) == ({("base", DIGEST): "bad"} if is_unloadable else {})


def test_one_base_does_not_speak_for_another() -> None:
    view = FleetView((failing("a"), replica("b", base="other", resident=(DIGEST,))))
    assert list(find_unloadable(view)) == [("base", DIGEST)]


def test_state_is_read_and_the_fingerprint_checked() -> None:
    state = {
        "is_ready": True,
        "model": {"fingerprint": "f"},
        "slots": [{"digest": DIGEST, "state": "ready"}, {"digest": None}],
        "waiting": 2,
        "running": 1,
        "loading": ["sha256:" + "b" * 64],
        "max_running": 16,
    }
    good = read_replica("http://a", "p", "base", state, "f")
    assert (good.problem, good.resident, good.load) == (None, frozenset({DIGEST}), 3)
    assert (good.num_slots, good.loading, good.max_running) == (2, frozenset({"sha256:" + "b" * 64}), 16)
    assert msgspec.structs.replace(good, num_own=2).num_foreign == 1
    assert msgspec.structs.replace(good, num_own=4).num_foreign == 0
    assert "another model" in (read_replica("http://a", "p", "base", state, "g").problem or "")
    assert "not registered" in (read_replica("http://a", "p", "base", state, None).problem or "")
    assert "starting" in (read_replica("http://a", "p", "base", {}, "f").problem or "")
    draining = state | {"is_draining": True, "is_ready": False}
    assert "draining" in (read_replica("http://a", "p", "base", draining, "f").problem or "")


def test_failures_are_read_and_what_is_not_understood_is_passed_over() -> None:
    failure = {"reason": "r", "code": "c", "attempts": 2, "is_content": True, "is_final": False, "retry_in_s": 4.5}
    state = {"failed": {DIGEST: failure | {"more": 1}}, "quarantined": {DIGEST: {"reason": "q", "strikes": 3}}}
    found = read_replica("http://a", "p", "base", state | {"host": [DIGEST, 3]}, "f")
    load = FailedLoad(reason="r", code="c", attempts=2, is_content=True, is_final=False, retry_in_s=4.5)
    assert (found.failed, found.in_memory) == ({DIGEST: load}, frozenset({DIGEST}))
    assert found.quarantined == {DIGEST: HarmfulAdapter(reason="q", strikes=3)}
    odd = read_replica("http://a", "p", "base", {"failed": {DIGEST: "x"}, "quarantined": [], "host": 1}, "f")
    assert (odd.failed, odd.quarantined, odd.in_memory) == ({}, {}, frozenset())


def test_clients_see_a_replicas_name_not_its_address() -> None:
    assert "10.0.0.7" not in replica("http://10.0.0.7:8100").name
