"""Sends a call to a replica: choice, identity, private headers, and one other replica if the first takes nothing.

Knows nothing of clients' connections or usage. Once an engine has answered there is no second try.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from loraplex.errors import NoReplicaError, ReplicaFailedError
from loraplex.fleet.fleet import Fleet
from loraplex.fleet.view import Replica
from loraplex.gateway.call import Call
from loraplex.gateway.resolution import Resolved
from loraplex_engine.wire import done
from loraplex_engine.wire.client import EngineAnswer, UnreachableError
from loraplex_engine.wire.client import ReplicaFailedError as EngineFailedError
from loraplex_registry.wire.identity import Identity, TokenSigner

_MAX_TRIES = 2
GAP_S = 30.0
"""Longest silence of an engine in the middle of a stream."""

_MS = 1000
_log = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be sent: a call, what its model resolved to, for whom, and the seconds it may take."""

    call: Call
    resolved: Resolved
    identity: Identity
    timeout_s: float


class Dispatcher:
    """Delivers orders to engines."""

    def __init__(self, fleet: Fleet, signer: TokenSigner) -> None:
        self._fleet = fleet
        self._signer = signer

    def choose(self, order: Order, exclude: tuple[str, ...] = ()) -> Replica:
        """Return the replica that gets the order.

        Raises:
            NoReplicaError: None serves its base, or adapters of its rank.
        """
        resolved = order.resolved
        replica = self._fleet.choose(resolved.base, resolved.digest, resolved.rank, exclude)
        if replica is not None:
            return replica
        if self._fleet.serves(resolved.base, exclude):
            raise NoReplicaError(
                f"No engine that takes adapters of rank {resolved.rank} serves {resolved.base} at the moment; an "
                f"administrator can start one with --max-lora-rank {resolved.rank}."
            )
        raise NoReplicaError(f"No engine serves {resolved.base} at the moment; try again shortly.")

    @asynccontextmanager
    async def deliver(
        self, order: Order, first: Replica, on_try: Callable[[Replica], None]
    ) -> AsyncIterator[EngineAnswer]:
        """Send the order and yield the answer; leaving the block closes the connection, which ends the generation.

        Args:
            order: What is sent.
            first: The replica that is tried first.
            on_try: Told of each replica before it is tried, so that the last one is the one that has the order.

        Raises:
            NoReplicaError: Neither `first` nor another one took it.
            ReplicaFailedError: The engine failed, or answered for something else.
        """
        async with AsyncExitStack() as stack:
            try:
                yield await self._open(order, first, on_try, stack)
            except EngineFailedError as error:
                raise ReplicaFailedError from error

    async def _open(
        self, order: Order, first: Replica, on_try: Callable[[Replica], None], stack: AsyncExitStack
    ) -> EngineAnswer:
        replica = first
        tried: tuple[str, ...] = ()
        while True:
            on_try(replica)
            try:
                answer = await self._try(order, replica, stack)
            except UnreachableError as error:
                _log.warning("engine %s takes no connection", replica.url)
                tried = (*tried, replica.url)
                if len(tried) == _MAX_TRIES:
                    raise NoReplicaError from error
                replica = self.choose(order, tried)
                continue
            _check_answer(answer, order, replica)
            return answer

    async def _try(self, order: Order, replica: Replica, stack: AsyncExitStack) -> EngineAnswer:
        """Open the answer and leave its end to `stack`; a replica that takes nothing has nothing in flight."""
        async with AsyncExitStack() as own:
            own.enter_context(self._fleet.count(replica.url))
            answer = await own.enter_async_context(
                self._fleet.client(replica.url).generate(
                    order.call.route,
                    order.call.encode_for(order.resolved.digest or order.resolved.base),
                    token=self._signer.sign(order.identity, "engine"),
                    headers=_private_headers(order),
                    # The caller's own clock ends the request; this one only keeps a lost wait from staying for ever.
                    deadline_s=order.timeout_s + 5,
                    gap_s=GAP_S if order.call.is_stream else order.timeout_s + 5,
                )
            )
            await stack.enter_async_context(own.pop_all())
            return answer


def show_deadline(timeout_s: float) -> str:
    """Whole milliseconds, at least one: a deadline of 0 is none that an engine takes."""
    return str(max(1, math.ceil(timeout_s * _MS)))


def _private_headers(order: Order) -> dict[str, str]:
    adapter = order.resolved.adapter
    return {
        done.REQUEST_ID: order.identity.request_id,
        done.TENANT_ID: (adapter.tenant_id if adapter else order.identity.tenant_id) or "",
        done.DEADLINE_MS: show_deadline(order.timeout_s),
        done.ECHO_MODEL: order.call.model,
    }


def _check_answer(answer: EngineAnswer, order: Order, replica: Replica) -> None:
    """Believe no engine that answers for other weights than those asked for, or refuses who we are."""
    if answer.status in (401, 403):
        _log.error("engine %s refuses the gateway's identity (%d); check its verify keys", replica.url, answer.status)
        raise ReplicaFailedError
    asked = order.resolved.digest or done.BASE_DIGEST
    if answer.status == 200 and answer.digest != asked:
        _log.error("engine %s answered with %s for %s", replica.url, answer.digest, asked)
        raise ReplicaFailedError
