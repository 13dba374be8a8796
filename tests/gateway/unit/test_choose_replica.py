"""The choice of a replica is a pure function of what is known."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.errors import SettingsError
from loraplex.fleet.pools import Pool, parse_pools
from loraplex.fleet.view import FleetView, Replica, choose_replica, read_replica

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


def choose(*replicas: Replica, digest: str | None = DIGEST, **options: Any) -> str | None:
    found = choose_replica(FleetView(replicas), "base", digest, options.pop("in_flight", {}), **options)
    return None if found is None else found.url


def test_residency_comes_before_load() -> None:
    assert choose(replica("a"), replica("b", resident=(DIGEST,), load=9)) == "b"


def test_equal_residency_goes_to_the_least_loaded() -> None:
    assert choose(replica("a", load=2), replica("b", load=1)) == "b"
    assert choose(replica("a", load=1), replica("b", resident=(DIGEST,)), digest=None) == "b"


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
