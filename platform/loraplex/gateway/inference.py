"""The request path: resolve, choose a replica, commit the request row, relay, settle. `Inference` composes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from litestar import Request
from litestar.types import ASGIApp

from loraplex.errors import InvalidRequestError, PermissionDeniedError
from loraplex.fleet.fleet import Fleet
from loraplex.fleet.view import Replica
from loraplex.gateway.call import Call, parse_call
from loraplex.gateway.directory import Directory
from loraplex.gateway.dispatch import Dispatcher, Order
from loraplex.gateway.drain import Drain
from loraplex.gateway.edge import CANARY_HEADER
from loraplex.gateway.metrics import GatewayMetrics
from loraplex.gateway.names import NameIndex
from loraplex.gateway.relay import Generation, Settle
from loraplex.gateway.resolution import Caller, Resolved, resolve
from loraplex.usage.ledger import Ledger
from loraplex.usage.record import RequestRow, Settlement
from loraplex_engine.wire.done import RequestDone
from loraplex_registry.wire.identity import Identity, TokenSigner

INFER = "infer"
TIMEOUT_HEADER = "x-request-timeout"
_TIMEOUT_S = 600.0
_MAX_TIMEOUT_S = 3600.0
_MAX_CANARY_KEY_LEN = 256
_BASE_LABEL = "base"


class Inference:
    """Everything an inference route needs."""

    def __init__(
        self,
        directory: Directory,
        names: NameIndex,
        fleet: Fleet,
        ledger: Ledger,
        signer: TokenSigner,
        metrics: GatewayMetrics,
        drain: Drain,
    ) -> None:
        self._directory = directory
        self._names = names
        self._fleet = fleet
        self._ledger = ledger
        self._dispatcher = Dispatcher(fleet, signer)
        self._metrics = metrics
        self._drain = drain

    async def generate(self, request: Request[Any, Any, Any], route: str) -> ASGIApp:
        """Return the answer to a generation; it is recorded from before its dispatch to its end."""
        order = await self._take_order(request, route)
        replica = self._dispatcher.choose(order)
        row = _build_row(order, replica, request.state.client_request_id)
        await self._ledger.open(row)
        return self._relay(
            order,
            replica,
            settle=lambda settlement, used: self._settle(msgspec.structs.replace(row, replica=used.url), settlement),
            note_progress=lambda count: self._ledger.note_progress(row.request_id, count),
        )

    async def inspect(self, request: Request[Any, Any, Any], route: str) -> ASGIApp:
        """Return an engine's answer that generates nothing, so costs nothing and is not recorded."""
        order = await self._take_order(request, route)
        return self._relay(order, self._dispatcher.choose(order), settle=_ignore, note_progress=lambda _: None)

    def build_caller(self, identity: Identity) -> Caller:
        """Return what `identity` may name."""
        if identity.is_platform:
            return Caller(tenant=None, bases=None)
        assert identity.tenant is not None, "only platform keys belong to no tenant"
        tenant = self._directory.find_tenant(identity.tenant)
        return Caller(tenant=identity.tenant, bases=() if tenant is None else tenant.bases)

    async def _take_order(self, request: Request[Any, Any, Any], route: str) -> Order:
        self._drain.check_open()
        identity: Identity = request.state.identity
        check_may_infer(identity)
        call = parse_call(route, await request.body())
        resolved = await self._resolve(call, identity, request.headers.get(CANARY_HEADER))
        return Order(
            call=call,
            resolved=resolved,
            identity=identity,
            timeout_s=read_timeout(request.headers.get(TIMEOUT_HEADER)),
        )

    async def _resolve(self, call: Call, identity: Identity, canary_header: str | None) -> Resolved:
        """Names are as fresh as the last acknowledged change, and pinned from here on."""
        await self._names.ensure_fresh()
        canary_key = (canary_header or call.canary_key or identity.key_id)[:_MAX_CANARY_KEY_LEN]
        return resolve(call.model, self.build_caller(identity), self._names, canary_key)

    def _relay(
        self,
        order: Order,
        replica: Replica,
        *,
        settle: Settle,
        note_progress: Callable[[int], None],
    ) -> Generation:
        async def abort(url: str) -> RequestDone | None:
            return await self._fleet.client(url).abort(order.identity.request_id)

        return Generation(
            order, replica, self._dispatcher, self._drain, settle=settle, abort=abort, note_progress=note_progress
        )

    async def _settle(self, row: RequestRow, settlement: Settlement) -> None:
        counted = settlement.counted
        self._metrics.count_generation(
            row.tenant,
            row.adapter or _BASE_LABEL,
            settlement.outcome,
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=counted.completion_tokens,
        )
        await self._ledger.settle(row, settlement)


def check_may_infer(identity: Identity) -> None:
    """Refuse keys without scope `infer`.

    Raises:
        PermissionDeniedError: The key lacks it.
    """
    if not identity.has_scope(INFER):
        raise PermissionDeniedError(f"This key lacks the scope {INFER}")


def read_timeout(text: str | None) -> float:
    """Return the seconds that a request may take; more than an hour is cut to an hour.

    Raises:
        InvalidRequestError: The header is no positive number.
    """
    if text is None:
        return _TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequestError(f"{TIMEOUT_HEADER} is a number of seconds above 0", param=TIMEOUT_HEADER)
    return min(seconds, _MAX_TIMEOUT_S)


async def _ignore(settlement: Settlement, used: Replica) -> None:
    """Nothing was generated, so nothing is recorded."""


def _build_row(order: Order, replica: Replica, client_request_id: str | None) -> RequestRow:
    identity, resolved = order.identity, order.resolved
    adapter, version = resolved.adapter, resolved.version
    return RequestRow(
        request_id=identity.request_id,
        tenant_id=adapter.tenant_id if adapter else identity.tenant_id,
        tenant=adapter.tenant if adapter else identity.tenant or "platform",
        adapter_id=adapter.adapter_id if adapter else None,
        adapter=adapter.name if adapter else None,
        version=version.number if version else None,
        digest=resolved.digest,
        base=resolved.base,
        key_id=identity.key_id,
        route=order.call.route,
        model=order.call.model,
        is_stream=order.call.is_stream,
        client_request_id=client_request_id,
        tags=order.call.tags,
        created_at=datetime.now(UTC),
        replica=replica.url,
    )
