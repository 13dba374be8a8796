"""Who may read metrics, and which: platform keys and this machine all, a tenant's key the series of that tenant.

The others' names, and how much they call, are none of a tenant's business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from litestar import Request

from loraplex.errors import PermissionDeniedError, UnavailableError
from loraplex.fleet.fleet import Fleet
from loraplex.gateway.authentication import Authenticator
from loraplex.gateway.metrics import BASE_LABEL, PLATFORM_LABEL, GatewayMetrics
from loraplex.gateway.names import NameIndex

_LOOPBACK = frozenset({"127.0.0.1", "::1"})
_FORWARDING = ("forwarded", "x-forwarded-for", "x-real-ip")
_SCOPE = "metrics:read"


class Scrape:
    """Answers scrapes; `freshen_keys` takes in what was changed at other gateways."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        fleet: Fleet,
        names: NameIndex,
        authenticator: Authenticator,
        freshen_keys: Callable[[], Awaitable[None]],
    ) -> None:
        self._metrics = metrics
        self._fleet = fleet
        self._names = names
        self._authenticator = authenticator
        self._freshen_keys = freshen_keys

    async def answer(self, request: Request[Any, Any, Any]) -> bytes:
        """Return the text of a scrape.

        Raises:
            AuthenticationError: There is no valid key, and the caller is not this machine.
            PermissionDeniedError: The key lacks the scope.
        """
        tenant = await self._find_tenant(request)
        if tenant is not None:
            return self._metrics.render_tenant(tenant)
        text = self._metrics.render(self._fleet.view, self._fleet.health.find_ejected())
        # after they were shown once more, so that no count is lost
        self._metrics.forget_gone(self._is_there)
        return text

    async def _find_tenant(self, request: Request[Any, Any, Any]) -> str | None:
        """Return whose series the caller may see, None for all."""
        authorization = request.headers.get("authorization")
        # A proxy on this machine calls from loopback too, but says for whom.
        is_forwarded = any(name in request.headers for name in _FORWARDING)
        if authorization is None and not is_forwarded and request.client and request.client.host in _LOOPBACK:
            return None
        # what is broken is to be seen above all when the database is away
        with suppress(UnavailableError):
            await self._freshen_keys()
        identity = self._authenticator.authenticate(authorization, request.state.request_id)
        if not identity.has_scope(_SCOPE):
            raise PermissionDeniedError(f"This key lacks the scope {_SCOPE}")
        return None if identity.is_platform else identity.tenant

    def _is_there(self, tenant: str, adapter: str) -> bool:
        if adapter == BASE_LABEL and (tenant == PLATFORM_LABEL or self._names.has_tenant(tenant)):
            return True
        return self._names.find_adapter(tenant, adapter) is not None
