"""The choice of a replica is a pure function of what is known."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.errors import SettingsError
from loraplex.fleet.pools import Pool, parse_pools
from loraplex.fleet.view import (
    FailedLoad,
    FleetView,
    HarmfulAdapter,
    Replica,
    choose_replica,
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


def choose(*replicas: Replica, digest: str | None = DIGEST, **options: Any) -> str | None:
    found = choose_replica(FleetView(replicas), "base", digest, options.pop("in_flight", {}), **options)
    return None if found is None else found.url


def test_residency_comes_before_load() -> None:
    assert choose(replica("a"), replica("b", resident=(DIGEST,), load=9)) == "b"


def test_an_adapter_goes_where_its_rank_is_served() -> None:
    low, high = replica("low", max_lora_rank=64), replica("high", load=9, max_lora_rank=128)
    assert choose(low, high, rank=64) == "low"
    assert choose(low, high, rank=65) == "high"
    assert choose(low, high, rank=129) is None
    assert choose(low, replica("silent", load=9), rank=65) == "silent"


def test_the_rank_limit_is_what_the_engine_says() -> None:
    def read(model: object) -> Replica:
        return read_replica("http://e", "p", "base", {"is_ready": True, "model": model}, "f")

    assert read({"fingerprint": "f", "max_lora_rank": 64}).max_lora_rank == 64
    assert read({"fingerprint": "f"}).max_lora_rank is read({"max_lora_rank": "many"}).max_lora_rank is None
    assert read("nothing").problem is not None


def test_equal_residency_goes_to_the_least_loaded() -> None:
    assert choose(replica("a", load=2), replica("b", load=1)) == "b"
    assert choose(replica("a", load=1), replica("b", resident=(DIGEST,)), digest=None) == "b"


def test_a_quarantined_adapter_goes_where_it_is_well_or_is_refused_where_it_is_quarantined() -> None:
    assert choose(harmed("a", resident=(DIGEST,)), replica("b", resident=(DIGEST,), load=9)) == "b"
    assert choose(harmed("a", load=9), replica("b")) == "a"
    assert choose(harmed("a"), replica("b"), exclude=("a",)) == "b"
    assert choose(harmed("a"), replica("b", load=1), digest=None) == "a"


def test_an_adapter_that_failed_to_load_goes_where_it_is_not_known() -> None:
    assert choose(failing("a"), replica("b", load=9)) == "b"
    assert choose(failing("a"), failing("b", load=1)) == "a"
    assert choose(failing("a", is_final=False), replica("b", load=9)) == "b"


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


def test_requests_in_flight_count_before_the_next_poll() -> None:
    assert choose(replica("a"), replica("b"), in_flight={"a": 1}) == "b"


def test_only_able_replicas_of_the_base_are_chosen() -> None:
    down, other = replica("a", problem="it cannot be reached"), replica("b", base="other")
    assert choose(down, other) is None
    assert choose(down, other, replica("c"), exclude=("c",)) is None


def test_state_is_read_and_the_fingerprint_checked() -> None:
    state = {
        "is_ready": True,
        "model": {"fingerprint": "f"},
        "slots": [{"digest": DIGEST, "state": "ready"}, {"digest": None}],
        "waiting": 2,
        "running": 1,
    }
    good = read_replica("http://a", "p", "base", state, "f")
    assert (good.problem, good.resident, good.load) == (None, frozenset({DIGEST}), 3)
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


def test_pools_are_parsed() -> None:
    text = '{"main": {"base": "base", "engines": ["http://127.0.0.1:8100/", "dns+http://engine:8100"]}}'
    assert parse_pools(text) == (Pool("main", "base", ("http://127.0.0.1:8100", "dns+http://engine:8100")),)
    assert parse_pools("{}") == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "LORAPLEX_POOLS"),
        ("[]", "LORAPLEX_POOLS"),
        ('{"main": {"engines": []}}', "base"),
        ('{"main": {"base": "b", "engines": "http://a"}}', "engines"),
        ('{"main": {"base": "b", "engines": ["ftp://a"]}}', "engines"),
        ('{"main": {"base": "b", "engines": [], "weight": 1}}', "weight"),
        ('{"main": {"model": "b", "engines": []}}', "not built yet"),
        ('{"Main": {"base": "b", "engines": []}}', "Main"),
    ],
)
def test_a_bad_pool_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        parse_pools(text)
