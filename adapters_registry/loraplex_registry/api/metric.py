"""What a registry counts that is a process of its own, and the route that shows it; in a gateway, the gateway counts.

No label takes a value that a client invents: results and checks are of our own tables.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version
from typing import Any

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from loraplex_registry.api.caller import get_caller
from loraplex_registry.errors import PermissionDeniedError

_SCOPE = "metrics:read"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_CREATED = 201


class RegistryMetrics:
    """All counters of one registry process, by the names that a gateway gives them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        # one distribution holds all parts, so this is the version of loraplex/version.py
        text = "The release that this process runs; always 1"
        Gauge("loraplex_build_info", text, ["version"], registry=self._registry).labels(version("loraplex")).set(1)
        self._uploads = self._counter(
            "loraplex_uploads",
            "Uploads by how they ended: a new version (created), content that was there (known), refused",
            "result",
        )
        self._upload_bytes = self._counter("loraplex_upload_bytes", "Bytes of the files of uploads that were admitted")
        self._upload_refusals = self._counter(
            "loraplex_upload_refusals", "Checks that uploads failed, by name", "check"
        )
        self._parity = self._counter(
            "loraplex_parity_verdicts",
            "Versions that passed the parity gate (pass), were quarantined by it (fail) or were not measured (warn)",
            "verdict",
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def count_admitted(self, status: int, num_bytes: int) -> None:
        """Count one upload that was admitted, as a new version (201) or as content that was there."""
        self._uploads.labels("created" if status == _CREATED else "known").inc()
        self._upload_bytes.inc(num_bytes)

    def count_refused(self, checks: Collection[str]) -> None:
        """Count one upload that was refused, and each of the checks that it failed."""
        self._uploads.labels("refused").inc()
        for check in checks:
            self._upload_refusals.labels(check).inc()

    def count_parity(self, verdict: str) -> None:
        """Count one verdict of the parity gate."""
        self._parity.labels(verdict).inc()

    def render(self) -> bytes:
        """Return all of them as Prometheus text."""
        return generate_latest(self._registry)


def build_metrics_route(metrics: RegistryMetrics) -> HTTPRouteHandler:
    """Return `GET /metrics`, for identities with the scope `metrics:read`."""

    @get("/metrics", sync_to_thread=False)
    def show_metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
        if not get_caller(request).has_scope(_SCOPE):
            raise PermissionDeniedError(f"This identity lacks the scope {_SCOPE}", param=None)
        return Response(metrics.render(), media_type=_TEXT)

    return show_metrics
