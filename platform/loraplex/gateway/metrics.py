"""The gateway's Prometheus metrics. No label takes a value that a client invents.

Tenants and adapters come from names that resolved, routes from the route table, reasons from the table of codes.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from loraplex.fleet.view import FleetView
from loraplex.gateway.problem import CODE_TO_STATUS

_MAX_SERIES = 500
_OTHER = "other"


class GatewayMetrics:
    """All counters of one gateway process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._adapter_requests = Counter(
            "loraplex_adapter_requests",
            "Generations by adapter and how they ended",
            ["tenant", "adapter", "outcome"],
            registry=self.registry,
        )
        self._http_requests = Counter(
            "loraplex_http_requests", "Answers by route and status", ["route", "status"], registry=self.registry
        )
        self._rejected = Counter(
            "loraplex_rejected", "Requests refused, by error code", ["reason"], registry=self.registry
        )
        self._tokens = Counter(
            "loraplex_tokens", "Tokens counted in usage", ["tenant", "direction"], registry=self.registry
        )
        self._replica_up = Gauge(
            "loraplex_replica_up", "Whether a replica gets traffic", ["pool", "replica"], registry=self.registry
        )
        self._refused = Gauge(
            "loraplex_replica_adapters_refused",
            "Adapters that a replica could not load, or has quarantined for itself",
            ["pool", "replica", "cause"],
            registry=self.registry,
        )
        self._quarantines = Counter(
            "loraplex_adapter_quarantines",
            "Versions quarantined because no engine can load them",
            registry=self.registry,
        )
        self._known: set[tuple[str, str]] = set()

    def count_answer(self, route: str, status: int) -> None:
        """Count one HTTP answer; `route` is a template of the route table."""
        self._http_requests.labels(route, str(status)).inc()

    def count_refusal(self, code: str) -> None:
        """Count one error by its code; a code that is not in our table is `other`."""
        self._rejected.labels(code if code in CODE_TO_STATUS else _OTHER).inc()

    def count_quarantines(self, num_versions: int) -> None:
        """Count versions that were quarantined."""
        self._quarantines.inc(num_versions)

    def count_generation(
        self, tenant: str, adapter: str, outcome: str, *, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Count one settled generation; beyond 500 adapters the rest is `other`."""
        tenant, adapter = self._cap(tenant, adapter)
        self._adapter_requests.labels(tenant, adapter, outcome).inc()
        self._tokens.labels(tenant, "prompt").inc(prompt_tokens)
        self._tokens.labels(tenant, "completion").inc(completion_tokens)

    def render(self, fleet: FleetView) -> bytes:
        """Return the text of a scrape."""
        self._replica_up.clear()
        self._refused.clear()
        for replica in fleet.replicas:
            self._replica_up.labels(replica.pool, replica.name).set(replica.problem is None)
            self._refused.labels(replica.pool, replica.name, "load").set(len(replica.failed))
            self._refused.labels(replica.pool, replica.name, "output").set(len(replica.quarantined))
        return generate_latest(self.registry)

    def _cap(self, tenant: str, adapter: str) -> tuple[str, str]:
        pair = (tenant, adapter)
        if pair not in self._known:
            if len(self._known) >= _MAX_SERIES:
                return _OTHER, _OTHER
            self._known.add(pair)
        return pair
