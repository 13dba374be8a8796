"""The front's own metrics; the core's come from the core. No label takes a value that a client invents."""

from __future__ import annotations

from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from loraplex_engine.wire.done import RequestDone


class FrontMetrics:
    """Counters of the HTTP front of one engine."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        # one distribution holds all parts, so this is the version of loraplex/version.py
        Gauge(
            "loraplex_build_info",
            "The release that this process runs; always 1",
            ["version"],
            registry=self._registry,
        ).labels(version("loraplex")).set(1)
        self.requests = Counter(
            "loraplex_front_requests",
            "Generations that ended, by how (stop, length, abort, error)",
            ["finish"],
            registry=self._registry,
        )
        self._tokens = Counter(
            "loraplex_front_tokens",
            "Tokens of generations that ended, as they are charged (prompt, cached, completion)",
            ["kind"],
            registry=self._registry,
        )
        self._load_bytes = Counter(
            "loraplex_front_load_bytes",
            "Bytes of adapters put into slots, as they are charged",
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

    def count_generation(self, done: RequestDone) -> None:
        """Count one generation that ended."""
        self.requests.labels(finish=done.finish).inc()
        self._tokens.labels(kind="prompt").inc(done.prompt_tokens)
        self._tokens.labels(kind="cached").inc(done.cached_tokens)
        self._tokens.labels(kind="completion").inc(done.completion_tokens)
        self._load_bytes.inc(done.load_bytes)

    def render(self) -> bytes:
        """Return all of them as Prometheus text."""
        return generate_latest(self._registry)
