"""What NetworkPolicies allow, as Kubernetes defines it: who is selected is closed but for the sum of the rules."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chart_world import NAMESPACE, Object, Rendering, matches


@dataclass(frozen=True)
class Place:
    """A pod with its labels and namespace, or an address outside of the cluster."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    namespace: str | None = NAMESPACE
    address: str | None = None


def is_allowed(policies: Iterable[Object], source: Place, target: Place, port: int, protocol: str = "TCP") -> bool:
    """Say whether a connection is let out at its source and in at its target."""
    found = list(policies)
    return _passes(found, "Egress", source, target, port, protocol) and _passes(
        found, "Ingress", target, source, port, protocol
    )


def is_let_in(policies: Iterable[Object], source: Place, target: Place, port: int) -> bool:
    """Say whether the target's side lets a connection in, whatever the source's side says."""
    return _passes(list(policies), "Ingress", target, source, port, "TCP")


def _passes(policies: list[Object], direction: str, subject: Place, other: Place, port: int, protocol: str) -> bool:
    if subject.address is not None:
        # no policy stands there
        return True
    closing = [
        one["spec"]
        for one in policies
        if direction in one["spec"]["policyTypes"]
        and one["metadata"]["namespace"] == subject.namespace
        and matches(one["spec"]["podSelector"], subject.labels)
    ]
    rules = [rule for spec in closing for rule in spec.get(direction.lower(), [])]
    side = "to" if direction == "Egress" else "from"
    return not closing or any(_means(rule, side, other, port, protocol) for rule in rules)


def _means(rule: Object, side: str, other: Place, port: int, protocol: str) -> bool:
    ports, peers = rule.get("ports"), rule.get(side)
    if ports is not None and not any((one["port"], one["protocol"]) == (port, protocol) for one in ports):
        return False
    return not peers or any(_is_peer(peer, other) for peer in peers)


def _is_peer(peer: Object, other: Place) -> bool:
    if "ipBlock" in peer:
        assert peer.keys() == {"ipBlock"}
        return other.address is not None and _is_within(other.address, peer["ipBlock"])
    if other.address is not None:
        return False
    space: dict[str, Any] | None = peer.get("namespaceSelector")
    if space is None and other.namespace != NAMESPACE:
        return False
    names = {"kubernetes.io/metadata.name": other.namespace or ""}
    return matches(space, names) and matches(peer.get("podSelector"), other.labels)


def _is_within(address: str, block: Object) -> bool:
    found = ipaddress.ip_address(address)
    excepted = (ipaddress.ip_network(one) for one in block.get("except", []))
    return found in ipaddress.ip_network(block["cidr"]) and not any(found in one for one in excepted)


def places_of(rendering: Rendering) -> list[Place]:
    """The pods of a release, one of each."""
    pods = {pod.owner["metadata"]["name"]: pod for pod in rendering.pods}
    return [
        Place(
            "/".join([pod.component, *([pod.labels["loraplex.io/pool"]] if "loraplex.io/pool" in pod.labels else [])]),
            pod.labels,
        )
        for pod in pods.values()
    ]
