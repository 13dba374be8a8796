"""Sends a call to a replica: choice, identity, private headers, and one other replica if the first fails it.

Knows nothing of clients' connections or usage. Once an engine has begun to answer there is no second try; that it
cannot answer at the moment is no answer. How each try went is told to the fleet.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from loraplex.errors import NoReplicaError, ReplicaFailedError
from loraplex.fleet.fleet import Fleet
from loraplex.fleet.health import FAULT_CODES
from loraplex.fleet.view import Replica
from loraplex.gateway.call import Call
from loraplex.gateway.prefix import find_prefix
from loraplex.gateway.problem import find_code
from loraplex.gateway.resolution import Resolved
from loraplex_engine.wire import done
from loraplex_engine.wire.client import EngineAnswer, UnreachableError
from loraplex_engine.wire.client import ReplicaFailedError as EngineFailedError
from loraplex_registry.wire.identity import Identity, TokenSigner

_MAX_TRIES = 2
GAP_S = 30.0
"""Longest silence of an engine in the middle of a stream."""

_MS = 1000
_FIRST_ERROR = 400
_QUICK_S = 2.0
_UNTRUSTED = (401, 403)
_log = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be sent: a call, what its model resolved to, for whom, and the seconds it may take.

    `weight` is the share of the tenant that it counts for, `priority` its key's; lower goes first.
    """

    call: Call
    resolved: Resolved
    identity: Identity
    timeout_s: float
    weight: int = 1
    priority: int = 0


class Dispatcher:
    """Delivers orders to engines."""

    def __init__(self, fleet: Fleet, signer: TokenSigner) -> None:
        self._fleet = fleet
        self._signer = signer

    def choose(self, order: Order, exclude: tuple[str, ...] = ()) -> Replica:
        """Return the replica that gets the order.

        Raises:
            NoReplicaError: None serves its base, or adapters of its rank and weights, or its full fine-tune.
        """
        resolved = order.resolved
        if resolved.pool is not None:
            return self._choose_full(resolved.pool, resolved.digest or "", exclude)
        replica = self._fleet.choose(
            resolved.base,
            resolved.digest,
            resolved.rank,
            exclude,
            prefix=find_prefix(order.call.fields, order.identity.tenant_id),
            weights=resolved.weights,
        )
        if replica is not None:
            return replica
        is_served = self._fleet.serves(resolved.base, exclude)
        if is_served and not self._fleet.serves(resolved.base, exclude, weights=resolved.weights):
            raise NoReplicaError(
                f"No engine serves {resolved.base} at the moment with the weights that {resolved.full_name} was "
                "compared on; an administrator can start one with them, or register the base with those of the engines."
            )
        if is_served:
            raise NoReplicaError(
                f"No engine that takes adapters of rank {resolved.rank} serves {resolved.base} at the moment; an "
                f"administrator can start one with --max-lora-rank {resolved.rank}."
            )
        raise NoReplicaError(f"No engine serves {resolved.base} at the moment; try again shortly.")

    def _choose_full(self, pool: str, digest: str, exclude: tuple[str, ...]) -> Replica:
        """Only replicas that serve exactly these files will do: never the adapter in their place."""
        replica = self._fleet.choose_full(pool, digest, exclude)
        if replica is None:
            raise NoReplicaError("No engine serves this full fine-tune at the moment; try again shortly.")
        return replica

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
            answer, replica = await self._open(order, first, on_try, stack)
            try:
                yield answer
            except (EngineFailedError, ReplicaFailedError) as error:
                _log.warning("engine %s broke its answer to %s", replica.url, order.identity.request_id)
                self._fleet.health.note_broken(replica.url)
                if isinstance(error, ReplicaFailedError):
                    raise
                raise ReplicaFailedError from error

    def note_end(self, replica: Replica, code: str | None) -> None:
        """Take note of how an answer ended that was whole: `code` is that of its error, if it was one."""
        if code in FAULT_CODES:
            self._fleet.health.note_fault(replica.url)

    async def _open(
        self, order: Order, first: Replica, on_try: Callable[[Replica], None], stack: AsyncExitStack
    ) -> tuple[EngineAnswer, Replica]:
        """Return an answer and whose it is; what was tried in vain is closed before another replica has the order."""
        replica = first
        tried: tuple[str, ...] = ()
        while True:
            on_try(replica)
            tried = (*tried, replica.url)
            began_at = time.monotonic()
            async with AsyncExitStack() as own:
                try:
                    answer = await self._try(order, replica, own)
                    is_passing = await self._is_passing(answer, replica, time.monotonic() - began_at)
                    other = self._find_other(order, tried) if is_passing else None
                    if other is None:
                        _check_answer(answer, order, replica)
                        await stack.enter_async_context(own.pop_all())
                        return answer, replica
                except (UnreachableError, EngineFailedError) as error:
                    self._fleet.health.note_broken(replica.url)
                    other = self._find_other(order, tried)
                    if other is None:
                        raise (NoReplicaError if isinstance(error, UnreachableError) else ReplicaFailedError) from error
            _log.warning("engine %s does not answer %s, %s may", replica.url, order.identity.request_id, other.url)
            replica = other

    def _find_other(self, order: Order, tried: tuple[str, ...]) -> Replica | None:
        """Return the replica that is tried after others, None if there is none or the order was tried enough."""
        if len(tried) == _MAX_TRIES:
            return None
        try:
            return self.choose(order, tried)
        except NoReplicaError:
            return None

    async def _is_passing(self, answer: EngineAnswer, replica: Replica, waited_s: float) -> bool:
        """Whether a replica refuses for a reason of its own that will pass; notes how it answers.

        Whoever has waited in one queue for long does not begin again in another.
        """
        code = find_code(await answer.read()) if answer.status >= _FIRST_ERROR else None
        if answer.status in _UNTRUSTED or code in FAULT_CODES:
            self._fleet.health.note_fault(replica.url)
        else:
            self._fleet.health.note_good(replica.url)
        return code in done.PASSING_CODES and (code != "queue_full" or waited_s < _QUICK_S)

    async def _try(self, order: Order, replica: Replica, own: AsyncExitStack) -> EngineAnswer:
        """Open the answer and leave its end to `own`; a replica that takes nothing has nothing in flight."""
        own.enter_context(self._fleet.count(replica.url))
        return await own.enter_async_context(
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


def show_deadline(timeout_s: float) -> str:
    """Whole milliseconds, at least one: a deadline of 0 is none that an engine takes."""
    return str(max(1, math.ceil(timeout_s * _MS)))


def _private_headers(order: Order) -> dict[str, str]:
    adapter = order.resolved.adapter
    headers = {
        done.REQUEST_ID: order.identity.request_id,
        done.TENANT_ID: (adapter.tenant_id if adapter else order.identity.tenant_id) or "",
        done.WEIGHT: str(order.weight),
        done.PRIORITY: str(order.priority),
        done.DEADLINE_MS: show_deadline(order.timeout_s),
        done.ECHO_MODEL: order.call.model,
    }
    if adapter is not None and adapter.tenant_id != order.identity.tenant_id:
        # who asks another team's adapter shares its turns, but finds no prefix of that team, nor leaves one to it
        headers[done.CACHE_SALT] = order.identity.tenant_id or order.identity.key_id
    return headers


def _check_answer(answer: EngineAnswer, order: Order, replica: Replica) -> None:
    """Believe no engine that answers for other weights than those asked for, or refuses who we are."""
    if answer.status in _UNTRUSTED:
        _log.error("engine %s refuses the gateway's identity (%d); check its verify keys", replica.url, answer.status)
        raise ReplicaFailedError
    # an engine that is asked for the digest of its own files serves them as its base
    asked = done.BASE_DIGEST if order.resolved.pool else order.resolved.digest or done.BASE_DIGEST
    if answer.status == 200 and answer.digest != asked:
        _log.error("engine %s answered with %s for %s", replica.url, answer.digest, asked)
        raise ReplicaFailedError
