"""NetworkPolicies allow the pairs that the platform needs and no other one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from chart_network import Place, is_allowed, is_let_in, places_of
from chart_world import Rendering

DNS = Place("dns", {"k8s-app": "kube-dns"}, "kube-system")
INGRESS = Place("ingress", {"app": "nginx"}, "ingress-nginx")
PROMETHEUS = Place("prometheus", {"app": "prometheus"}, "monitoring")
NEIGHBOUR = Place("neighbour", {"app": "else"})
STRANGER = Place("stranger", {"app.kubernetes.io/component": "gateway"}, "elsewhere")
DATABASE = Place("database", address="10.0.10.7", namespace=None)
REDIS = Place("redis", address="10.0.11.7", namespace=None)
BUCKET = Place("bucket", address="10.0.12.7", namespace=None)
HUB = Place("hub", address="93.184.216.34", namespace=None)
METADATA = Place("metadata", address="169.254.169.254", namespace=None)
OUTSIDE = (DNS, INGRESS, PROMETHEUS, NEIGHBOUR, STRANGER, DATABASE, REDIS, BUCKET, HUB, METADATA)
PORTS = (53, 80, 443, 5432, 6379, 8080, 8081, 8100, 9090)


def find_pairs(rendering: Rendering) -> set[tuple[str, str, int]]:
    """Every connection from or to a pod of the release that the policies allow; those to DNS by UDP."""
    policies, ours = rendering.of_kind("NetworkPolicy"), places_of(rendering)
    names = {place.name for place in ours}
    places = [*ours, *OUTSIDE]
    return {
        (source.name, target.name, port)
        for source, target, port in product(places, places, PORTS)
        if source is not target and {source.name, target.name} & names
        if is_allowed(policies, source, target, port, "UDP" if port == 53 else "TCP")
    }


def test_production_allows_what_is_needed_and_nothing_else(render: Callable[[str], Rendering]) -> None:
    assert find_pairs(render("production")) == {
        ("ingress", "gateway", 8080),
        ("prometheus", "gateway", 8080),
        ("prometheus", "engine/main", 8100),
        ("gateway", "engine/main", 8100),
        ("gateway", "database", 5432),
        ("gateway", "redis", 6379),
        ("gateway", "bucket", 443),
        ("engine/main", "registry", 8081),
        ("engine/main", "hub", 443),
        ("registry", "database", 5432),
        ("registry", "bucket", 443),
        ("migration", "database", 5432),
        ("registration/main", "gateway", 8080),
        ("registration/main", "hub", 443),
        ("test", "gateway", 8080),
        *(
            (name, "dns", 53)
            for name in ("gateway", "registry", "engine/main", "migration", "registration/main", "test")
        ),
    }


@pytest.mark.parametrize(
    ("target", "port", "expected"),
    [
        ("engine/main", 8100, {"gateway", "prometheus"}),
        ("registry", 8081, {"engine/main"}),
        ("gateway", 8080, {"ingress", "prometheus", "registration/main", "test"}),
        ("migration", 8080, set()),
    ],
)
def test_each_part_defends_itself(
    render: Callable[[str], Rendering], target: str, port: int, expected: set[str]
) -> None:
    """Also against pods of the release that something else lets out."""
    policies, ours = render("production").of_kind("NetworkPolicy"), places_of(render("production"))
    (subject,) = [place for place in ours if place.name == target]
    others = [place for place in (*ours, *OUTSIDE) if place is not subject]
    assert {place.name for place in others if is_let_in(policies, place, subject, port)} == expected


def test_without_a_registry_of_its_own_engines_reach_the_gateway(render: Callable[[str], Rendering]) -> None:
    pairs = find_pairs(render("plain"))
    assert {pair for pair in pairs if pair[1] == "engine/main"} == {("gateway", "engine/main", 8100)}
    inside = {pair for pair in pairs if pair[0] == "engine/main" and pair[1] not in {place.name for place in OUTSIDE}}
    assert inside == {("engine/main", "gateway", 8080)}
    # clients may be anywhere where none are named; Redis is off
    assert {source for source, target, _ in pairs if target == "gateway"} >= {"stranger", "neighbour", "hub"}
    assert not {pair for pair in pairs if pair[0] == "gateway" and pair[2] == 6379}


def test_pools_reach_the_hub_only_where_they_fetch(render: Callable[[str], Rendering]) -> None:
    pairs = find_pairs(render("everything"))
    fetching = {
        source for source, target, port in pairs if (target, port) == ("hub", 443) and source.startswith("engine")
    }
    assert fetching == {"engine/main", "engine/small"}
    assert not {pair for pair in pairs if pair[0].startswith("engine") and pair[1].startswith("engine")}
    assert {source for source, target, _ in pairs if target == "registry"} == {*fetching, "engine/full", "prometheus"}
    # engines that run elsewhere
    assert ("gateway", "hub", 8100) in pairs


def test_a_trial_is_reached_at_its_door_alone(render: Callable[[str], Rendering]) -> None:
    pairs = find_pairs(render("trial"))
    assert {port for _, target, port in pairs if target == "trial"} == {8080}
    assert {(target, port) for source, target, port in pairs if source == "trial" and port != 443} == {("dns", 53)}


@pytest.mark.parametrize("name", ["production", "everything", "plain", "trial"])
def test_what_nothing_else_allows_is_denied(render: Callable[[str], Rendering], name: str) -> None:
    (deny,) = [one for one in render(name).of_kind("NetworkPolicy") if one["metadata"]["name"].endswith("default-deny")]
    for place, other in product(places_of(render(name)), OUTSIDE):
        assert not is_allowed([deny], place, other, 443)
        assert not is_allowed([deny], other, place, 8100)


def test_without_policies_everything_is_allowed(render: Callable[[str], Rendering]) -> None:
    """So the evaluator can say yes, too."""
    assert not render("open").of_kind("NetworkPolicy")
    assert ("stranger", "engine/main", 8100) in find_pairs(render("open"))
