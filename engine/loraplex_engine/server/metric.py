"""The front's own metrics; the core's come from the core. No label takes a value that a client invents."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class FrontMetrics:
    """Counters of the HTTP front of one engine."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "loraplex_front_requests",
            "Generations that ended, by how (stop, length, abort, error)",
            ["finish"],
            registry=self._registry,
        )
        self.refused = Counter(
            "loraplex_front_refused",
            "Calls answered with an error before the model ran, by code",
            ["code"],
            registry=self._registry,
        )
        self.aborts = Counter(
            "loraplex_front_aborts", "Generations aborted since nobody reads them any more", registry=self._registry
        )
        self.open_requests = Gauge(
            "loraplex_front_open_requests", "Generations that have not ended", registry=self._registry
        )
        self.core_restarts = Gauge(
            "loraplex_front_core_restarts", "Times the core was started again", registry=self._registry
        )
        self.core_stuck = Gauge(
            "loraplex_front_core_stuck", "Times the core was ended because it had got stuck", registry=self._registry
        )

    def render(self) -> bytes:
        """Return all of them as Prometheus text."""
        return generate_latest(self._registry)
