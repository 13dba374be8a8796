"""The request path: resolve, reserve, choose a replica, commit the request row, relay, settle.

`Inference` composes it.
"""

from __future__ import annotations

import math
import re
import time
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
from loraplex.gateway.limiting import find_charges, is_request
from loraplex.gateway.metrics import BASE_LABEL, PLATFORM_LABEL, GatewayMetrics
from loraplex.gateway.names import NameIndex
from loraplex.gateway.relay import Generation, NoteProgress, Settle
from loraplex.gateway.resolution import Caller, Resolved, find_part, resolve
from loraplex.quotas.limiter import Limiter, Reservation
from loraplex.stats.recorder import Ended, StatsRecorder
from loraplex.usage.ledger import Ledger
from loraplex.usage.record import RequestRow, Settlement
from loraplex_engine.wire.done import RequestDone
from loraplex_registry.wire.identity import Identity, TokenSigner
from loraplex_registry.wire.log import note

INFER = "infer"
TIMEOUT_HEADER = "x-request-timeout"
_TIMEOUT_S = 600.0
_MAX_TIMEOUT_S = 3600.0
_CANARY_KEY = re.compile(r"[!-~]{1,200}")


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
        limiter: Limiter,
        stats: StatsRecorder,
    ) -> None:
        self._directory = directory
        self._names = names
        self._fleet = fleet
        self._ledger = ledger
        self._dispatcher = Dispatcher(fleet, signer)
        self._metrics = metrics
        self._drain = drain
        self._limiter = limiter
        self._stats = stats

    async def generate(self, request: Request[Any, Any, Any], route: str) -> ASGIApp:
        """Return the answer to a generation; it is recorded from before its dispatch to its end."""
        began_at = time.perf_counter()
        order = await self._take_order(request, route)
        reservation = await self._reserve(order, generates=True)
        try:
            # after the limits: what they refuse is no load of any replica, and makes no adapter hot
            replica = self._dispatcher.choose(order)
            row = _build_row(order, replica, request.state.client_request_id)
            await self._ledger.open(row)
        except BaseException:
            await reservation.release()
            raise
        part = find_part(order.resolved)
        note(tenant=row.tenant, adapter=row.adapter, version=row.version, digest=row.digest, base=row.base)
        watch = self._stats.watch(row.base, (row.tenant_id, row.tenant), row.adapter, began_at)

        async def settle(settlement: Settlement, used: Replica) -> None:
            watch.end(used, _describe_end(settlement))
            _note_end(settlement, used)
            if part is not None and row.adapter is not None:
                self._metrics.count_canary(row.tenant, row.adapter, part, settlement.outcome)
            await self._settle(msgspec.structs.replace(row, replica=used.url), settlement, reservation)

        def note_progress(num_events: int, used: Replica, arrived_at: float) -> None:
            watch.note_arrival(used, arrived_at)
            self._ledger.note_progress(row.request_id, num_events)

        return self._relay(order, replica, reservation, settle=settle, note_progress=note_progress)

    async def inspect(self, request: Request[Any, Any, Any], route: str) -> ASGIApp:
        """Return an engine's answer that generates nothing: it costs no tokens and is not recorded."""
        order = await self._take_order(request, route)
        reservation = await self._reserve(order, generates=False)
        try:
            replica = self._dispatcher.choose(order)
        except BaseException:
            await reservation.release()
            raise

        async def settle(settlement: Settlement, used: Replica) -> None:  # noqa: ARG001
            await reservation.settle(0, counts=is_request(settlement))

        return self._relay(order, replica, reservation, settle=settle, note_progress=_note_nothing)

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
        resolved = await self._resolve(call, identity, read_canary_key(request.headers.get(CANARY_HEADER)))
        return Order(
            call=call,
            resolved=resolved,
            identity=identity,
            timeout_s=read_timeout(request.headers.get(TIMEOUT_HEADER)),
            weight=self._directory.find_weight(resolved.adapter.tenant if resolved.adapter else identity.tenant),
            priority=self._directory.find_priority(identity.key_id),
        )

    async def _resolve(self, call: Call, identity: Identity, canary_key: str | None) -> Resolved:
        """Names are as fresh as the last acknowledged change, and pinned from here on."""
        await self._names.ensure_fresh()
        deciding = canary_key or call.canary_key or identity.key_id
        return resolve(call.model, self.build_caller(identity), self._names, deciding)

    async def _reserve(self, order: Order, *, generates: bool) -> Reservation:
        """Reserve what the order may cost, in all limits that it has to keep."""
        charges = find_charges(order, self._directory, generates=generates)
        return await self._limiter.reserve(charges, order.identity.request_id)

    def _relay(
        self,
        order: Order,
        replica: Replica,
        reservation: Reservation,
        *,
        settle: Settle,
        note_progress: NoteProgress,
    ) -> Generation:
        async def abort(url: str) -> RequestDone | None:
            return await self._fleet.client(url).abort(order.identity.request_id)

        return Generation(
            order,
            replica,
            self._dispatcher,
            self._drain,
            settle=settle,
            abort=abort,
            note_progress=note_progress,
            headers=reservation.headers,
        )

    async def _settle(self, row: RequestRow, settlement: Settlement, reservation: Reservation) -> None:
        """Commit usage first: counts of days and months are taken from it."""
        counted = settlement.counted
        self._metrics.count_generation(
            row.tenant,
            row.adapter or BASE_LABEL,
            settlement.outcome,
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=counted.completion_tokens,
        )
        try:
            await self._ledger.settle(row, settlement)
        finally:
            num_tokens = counted.prompt_tokens + counted.completion_tokens
            await reservation.settle(num_tokens, counts=is_request(settlement))


def _note_nothing(num_events: int, used: Replica, arrived_at: float) -> None:
    """What generates nothing has no progress."""


def _note_end(settlement: Settlement, used: Replica) -> None:
    counted = settlement.counted
    note(
        replica=used.name,
        outcome=settlement.outcome,
        code=settlement.code,
        finish=counted.finish,
        prompt_tokens=counted.prompt_tokens,
        cached_tokens=counted.cached_tokens,
        completion_tokens=counted.completion_tokens,
        queue_s=counted.queue_s,
        load_s=counted.load_s,
        prefill_s=counted.prefill_s,
        decode_s=counted.decode_s,
    )


def _describe_end(settlement: Settlement) -> Ended:
    counted = settlement.counted
    return Ended(
        outcome=settlement.outcome,
        prompt_tokens=counted.prompt_tokens,
        cached_tokens=counted.cached_tokens,
        completion_tokens=counted.completion_tokens,
        preemptions=counted.preemptions,
        queue_s=counted.queue_s,
        load_s=counted.load_s,
        prefill_s=counted.prefill_s,
    )


def check_may_infer(identity: Identity) -> None:
    """Refuse keys without scope `infer`.

    Raises:
        PermissionDeniedError: The key lacks it.
    """
    if not identity.has_scope(INFER):
        raise PermissionDeniedError(f"This key lacks the scope {INFER}")


def read_canary_key(text: str | None) -> str | None:
    """Return the key that a header gives.

    Raises:
        InvalidRequestError: It is too long, or not of visible ASCII characters.
    """
    if text is not None and _CANARY_KEY.fullmatch(text) is None:
        raise InvalidRequestError(f"{CANARY_HEADER} is 1 to 200 visible ASCII characters", param=CANARY_HEADER)
    return text


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


def _build_row(order: Order, replica: Replica, client_request_id: str | None) -> RequestRow:
    identity, resolved = order.identity, order.resolved
    adapter, version = resolved.adapter, resolved.version
    return RequestRow(
        request_id=identity.request_id,
        tenant_id=adapter.tenant_id if adapter else identity.tenant_id,
        tenant=adapter.tenant if adapter else identity.tenant or PLATFORM_LABEL,
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
