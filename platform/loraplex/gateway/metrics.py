"""The gateway's Prometheus metrics. No label takes a value that a client invents.

Tenants and adapters come from names that resolved, routes from the route table, reasons from the table of codes.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, generate_latest
from prometheus_client.samples import Sample

from loraplex.escalations.machine import OPEN_STATES
from loraplex.fleet.difference import KINDS
from loraplex.fleet.view import FleetView
from loraplex.gateway.problem import CODE_TO_STATUS
from loraplex.version import __version__

BASE_LABEL = "base"
"""The label `adapter` of calls of a base."""
PLATFORM_LABEL = "platform"
"""The label `tenant` of calls of a base by platform keys."""

_CREATED = 201
_MAX_SERIES = 500
_OTHER = "other"
_BEGAN = "_created"
_DIRECTIONS = ("prompt", "completion")


class GatewayMetrics:
    """All counters of one gateway process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = self._counter, self._gauge
        gauge("loraplex_build_info", "The release that this process runs; always 1", "version").labels(__version__).set(
            1
        )
        self._adapter_requests = counter(
            "loraplex_adapter_requests", "Generations by adapter and how they ended", "tenant", "adapter", "outcome"
        )
        self._canary_requests = counter(
            "loraplex_canary_requests",
            "Generations of versions that share a live alias, by their part (main, canary) and how they ended",
            "tenant",
            "adapter",
            "part",
            "outcome",
        )
        self._escalations = gauge("loraplex_escalations", "Escalations that are open, by state", "state")
        self._http_requests = counter("loraplex_http_requests", "Answers by route and status", "route", "status")
        self._rejected = counter("loraplex_rejected", "Requests refused, by error code", "reason")
        self._tokens = counter("loraplex_tokens", "Tokens counted in usage", "tenant", "direction")
        self._replica_up = gauge("loraplex_replica_up", "Whether a replica gets traffic", "pool", "replica")
        self._replica_trusted = gauge(
            "loraplex_replica_trusted",
            "Whether this gateway sends requests to a replica, by how those before went there",
            "pool",
            "replica",
        )
        self._placements = counter("loraplex_placements", "Replicas chosen for requests, by what decided", "reason")
        self._refused = gauge(
            "loraplex_replica_adapters_refused",
            "Adapters that a replica could not load, or has quarantined for itself",
            "pool",
            "replica",
            "cause",
        )
        self._quarantines = counter(
            "loraplex_adapter_quarantines", "Versions quarantined because no engine can load them"
        )
        self._parity = counter(
            "loraplex_parity_verdicts",
            "Versions that passed the parity gate (pass), were quarantined by it (fail) or were not measured (warn)",
            "verdict",
        )
        self._differences = gauge(
            "loraplex_fleet_differences", "Things about the fleet that are not as they should be", "kind"
        )
        self._repairs = counter(
            "loraplex_fleet_repairs",
            "Repairs of such differences that were made (made) or could not be (failed)",
            "kind",
            "result",
        )
        self._uploads = counter(
            "loraplex_uploads",
            "Uploads by how they ended: a new version (created), content that was there (known), refused",
            "result",
        )
        self._upload_bytes = counter("loraplex_upload_bytes", "Bytes of the files of uploads that were admitted")
        self._upload_refusals = counter("loraplex_upload_refusals", "Checks that uploads failed, by name", "check")
        self.redis_up = gauge("loraplex_redis_up", "Whether gateways tell each other of changes by Redis")
        self.limits_degraded = gauge(
            "loraplex_limits_degraded", "Whether this gateway counts limits alone, though others are there"
        )
        self._known: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self._known_canaries: defaultdict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def count_answer(self, route: str, status: int) -> None:
        """Count one HTTP answer; `route` is a template of the route table."""
        self._http_requests.labels(route, str(status)).inc()

    def count_refusal(self, code: str) -> None:
        """Count one error by its code; a code that is not in our table is `other`."""
        self._rejected.labels(code if code in CODE_TO_STATUS else _OTHER).inc()

    def count_quarantines(self, num_versions: int) -> None:
        """Count versions that were quarantined."""
        self._quarantines.inc(num_versions)

    def count_parity(self, verdict: str) -> None:
        """Count one verdict of the parity gate."""
        self._parity.labels(verdict).inc()

    def count_admitted(self, status: int, num_bytes: int) -> None:
        """Count one upload that was admitted, as a new version (201) or as content that was there."""
        self._uploads.labels("created" if status == _CREATED else "known").inc()
        self._upload_bytes.inc(num_bytes)

    def count_refused(self, checks: Collection[str]) -> None:
        """Count one upload that was refused, and each of the registry's checks that it failed."""
        self._uploads.labels("refused").inc()
        for check in checks:
            self._upload_refusals.labels(check).inc()

    def count_placement(self, reason: str) -> None:
        """Count the choice of a replica; `reason` is one of the fleet's own."""
        self._placements.labels(reason).inc()

    def count_repair(self, kind: str, *, is_made: bool) -> None:
        """Count one repair of a difference of that kind."""
        self._repairs.labels(kind, "made" if is_made else "failed").inc()

    def show_differences(self, kind_to_number: Mapping[str, int]) -> None:
        """Show how many differences of each kind there are now."""
        for kind in KINDS:
            self._differences.labels(kind).set(kind_to_number.get(kind, 0))

    def count_generation(
        self, tenant: str, adapter: str, outcome: str, *, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Count one settled generation; beyond 500 adapters that are there the rest is `other`."""
        if (tenant, adapter) in self._known or len(self._known) < _MAX_SERIES:
            self._known[tenant, adapter].add(outcome)
        else:
            tenant, adapter = _OTHER, _OTHER
        self._adapter_requests.labels(tenant, adapter, outcome).inc()
        self._tokens.labels(tenant, "prompt").inc(prompt_tokens)
        self._tokens.labels(tenant, "completion").inc(completion_tokens)

    def count_canary(self, tenant: str, adapter: str, part: str, outcome: str) -> None:
        """Count one settled generation of a version that shares a live alias; beyond 500 adapters none."""
        if (tenant, adapter) in self._known_canaries or len(self._known_canaries) < _MAX_SERIES:
            self._known_canaries[tenant, adapter].add((part, outcome))
            self._canary_requests.labels(tenant, adapter, part, outcome).inc()

    def show_escalations(self, states: Iterable[str]) -> None:
        """Show how many escalations are open in each state."""
        number = Counts(states)
        for state in OPEN_STATES:
            self._escalations.labels(state).set(number[state])

    def render(self, fleet: FleetView, ejected: Collection[str] = ()) -> bytes:
        """Return the text of a scrape: all there is; `ejected` are the URLs that are not trusted."""
        self._replica_up.clear()
        self._replica_trusted.clear()
        self._refused.clear()
        for replica in fleet.replicas:
            self._replica_up.labels(replica.pool, replica.name).set(replica.problem is None)
            self._replica_trusted.labels(replica.pool, replica.name).set(replica.url not in ejected)
            self._refused.labels(replica.pool, replica.name, "load").set(len(replica.failed))
            self._refused.labels(replica.pool, replica.name, "output").set(len(replica.quarantined))
        return generate_latest(_Series(self.registry))

    def render_tenant(self, tenant: str) -> bytes:
        """Return the series of one tenant, and nothing that the others have a part in."""
        return generate_latest(_Series(self.registry, tenant))

    def forget_gone(self, is_there: Callable[[str, str], bool]) -> None:
        """Drop the series of adapters and tenants that are no longer there; others may have their place."""
        for tenant, adapter in [pair for pair in self._known if not is_there(*pair)]:
            for outcome in self._known.pop((tenant, adapter)):
                self._adapter_requests.remove(tenant, adapter, outcome)
            if all(other != tenant for other, _ in self._known):
                for direction in _DIRECTIONS:
                    self._tokens.remove(tenant, direction)
        for tenant, adapter in [pair for pair in self._known_canaries if not is_there(*pair)]:
            for part, outcome in self._known_canaries.pop((tenant, adapter)):
                self._canary_requests.remove(tenant, adapter, part, outcome)


class _Series(CollectorRegistry):
    """The samples of a registry that are to be shown, of one tenant or all; when each series began is not shown."""

    def __init__(self, of: CollectorRegistry, tenant: str | None = None) -> None:
        super().__init__()
        self._of = of
        self._tenant = tenant

    def collect(self) -> Iterator[Metric]:
        """Yield families with what is shown of them; a tenant is not told of those that have nothing of its own."""
        for family in self._of.collect():
            shown = Metric(family.name, family.documentation, family.type)
            shown.samples = [sample for sample in family.samples if self._is_shown(sample)]
            if shown.samples or self._tenant is None:
                yield shown

    def _is_shown(self, sample: Sample) -> bool:
        if sample.name.endswith(_BEGAN):
            return False
        # what is counted as `other` is of many
        return self._tenant is None or sample.labels.get("tenant") == self._tenant != _OTHER
