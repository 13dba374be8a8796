"""One answer on its way from an engine to a client: `Generation` owns it from the committed request row to settlement.

Whatever happens first decides: the end of the answer, the client going away, the time limit, the end of this process.
Only whole events are passed on, as they came. Usage is committed before the client can know that its answer is
complete. A client that reads nothing for a while is cut off by the server's protocol, and so has gone away.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from litestar.types import Receive, Scope, Send

from loraplex.errors import DeadlineExceededError, DrainingError, LoraplexError, ReplicaFailedError
from loraplex.fleet.view import Replica
from loraplex.gateway.dispatch import Dispatcher, Order
from loraplex.gateway.drain import Drain
from loraplex.gateway.problem import describe, find_code
from loraplex.usage.record import Done, Settlement
from loraplex_engine.wire.client import EngineAnswer
from loraplex_engine.wire.done import RequestDone

_STREAM_TYPE, _WHOLE_TYPE = "text/event-stream; charset=utf-8", "application/json"
_SECONDS = re.compile(r"[0-9]{1,6}")
_log = logging.getLogger(__name__)

Settle = Callable[[Settlement, Replica], Awaitable[None]]
NoteProgress = Callable[[int, Replica, float], None]
Abort = Callable[[str], Awaitable[RequestDone | None]]


class ClientGoneError(Exception):
    """The client's connection is closed."""


class Generation:
    """An ASGI application that answers one inference request.

    Args:
        order: What is sent to the engine.
        replica: The replica that is tried first.
        dispatcher: Sends it.
        drain: Tells when this process must end.
        settle: Commits how it ended, and the replica that had it last.
        abort: Ends it at the engine whose URL is given, and says what it cost.
        note_progress: Takes the number of events passed on, whose they are, and when the last of them came.
        headers: Of the answer, beside those of the relay.
    """

    def __init__(
        self,
        order: Order,
        replica: Replica,
        dispatcher: Dispatcher,
        drain: Drain,
        *,
        settle: Settle,
        abort: Abort,
        note_progress: NoteProgress,
        headers: Mapping[str, str],
    ) -> None:
        self._order = order
        self._replica = replica
        self._dispatcher = dispatcher
        self._drain = drain
        self._settle = settle
        self._abort = abort
        self._note_progress = note_progress
        self._headers = headers
        self._num_events = 0
        self._has_started = False
        self._is_settled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Answer; errors before the first byte are raised, later ones become an error event."""
        try:
            await self._race(receive, send)
        except ClientGoneError:
            await self._settle_aborted("cancelled", None)
        except LoraplexError as error:
            await self._settle_aborted("error", error.code)
            if not self._has_started:
                raise
            await _send_error_event(send, error)
        except BaseException:
            await self._settle_aborted("error", "internal_error")
            raise

    async def _race(self, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(send))
        gone = asyncio.create_task(_wait_until_gone(receive))
        expired = asyncio.create_task(self._drain.wait_expired())
        tasks = (work, gone, expired)
        try:
            await asyncio.wait(tasks, timeout=self._order.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = [task.done() for task in tasks]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        is_answered, is_gone, is_expired = ended
        if is_answered:
            work.result()
        elif is_gone:
            raise ClientGoneError
        else:
            raise DrainingError if is_expired else DeadlineExceededError

    async def _answer(self, send: Send) -> None:
        async with self._dispatcher.deliver(self._order, self._replica, self._take_replica) as answer:
            if answer.is_stream:
                await self._pass_stream(answer, send)
            else:
                await self._pass_whole(answer, send)

    def _take_replica(self, replica: Replica) -> None:
        self._replica = replica

    async def _pass_whole(self, answer: EngineAnswer, send: Send) -> None:
        body = await answer.read()
        await self._settle_answered(answer, None if answer.status < 400 else _read_code(body))
        await self._start(answer, send, {"content-length": str(len(body))})
        await _send_body(send, body, more=False)

    async def _pass_stream(self, answer: EngineAnswer, send: Send) -> None:
        await self._start(answer, send)
        async for events in answer.events():
            if events.is_last:
                code = _read_code(events.error) if events.error else None
                self._dispatcher.note_end(self._replica, code)
                await self._settle_answered(answer, code)
                await _send_body(send, events.data, more=False)
                return
            if events.count:
                self._num_events += events.count
                self._note_progress(self._num_events, self._replica, events.arrived_at)
            await _send_body(send, events.data, more=True)
        raise ReplicaFailedError("The engine ended its answer in the middle; send the request again.")

    async def _start(self, answer: EngineAnswer, send: Send, more: dict[str, str] | None = None) -> None:
        # not the engine's word: an answer of one that was taken over must be no page to a browser
        passed = {"content-type": _STREAM_TYPE if answer.is_stream else _WHOLE_TYPE}
        retry_after = answer.header("retry-after")
        if retry_after is not None and _SECONDS.fullmatch(retry_after):
            passed["retry-after"] = retry_after
        headers = passed | self._own_headers(is_stream=answer.is_stream) | (more or {})
        self._has_started = True
        await send(
            {
                "type": "http.response.start",
                "status": answer.status,
                "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            }
        )

    def _own_headers(self, *, is_stream: bool) -> dict[str, str]:
        resolved = self._order.resolved
        headers = {
            "x-loraplex-model": resolved.full_name,
            "x-loraplex-digest": resolved.digest or "base",
            "x-loraplex-replica": self._replica.name,
        }
        return {**headers, **self._headers, **({"cache-control": "no-store"} if is_stream else {})}

    async def _settle_answered(self, answer: EngineAnswer, code: str | None) -> None:
        done = _read_done(answer.done) if answer.done else Done(completion_tokens=self._num_events)
        if answer.done is None and code is None:
            _log.warning("%s: the engine did not say what it cost", self._order.identity.request_id)
        await self._record(Settlement(outcome="ok" if code is None else "error", code=code, done=done))

    async def _settle_aborted(self, outcome: str, code: str | None) -> None:
        if self._is_settled:
            return
        done = await self._find_cost()
        await self._record(Settlement(outcome=outcome, code=code, done=done))

    async def _find_cost(self) -> Done:
        """Ask the engine; if it is gone, what was passed on is the last that is known."""
        try:
            done = await self._abort(self._replica.url)
        except Exception as error:  # noqa: BLE001 - whatever an engine does here, the request must be settled
            _log.info("%s: the engine did not confirm the end: %r", self._order.identity.request_id, error)
            done = None
        return Done(completion_tokens=self._num_events) if done is None else _read_done(done)

    async def _record(self, settlement: Settlement) -> None:
        """Commit; if the database is away the answer goes on, and the ledger writes it when it is back."""
        self._is_settled = True
        try:
            await self._settle(settlement, self._replica)
        except LoraplexError as error:
            _log.error("%s could not be settled: %s", self._order.identity.request_id, error.message)


async def _wait_until_gone(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    """Send, as fast as the client takes it."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _send_error_event(send: Send, error: LoraplexError) -> None:
    await _send_body(send, b"data: %b\n\n" % describe(error).encode(), more=False)


def _read_done(done: RequestDone) -> Done:
    found = msgspec.structs.asdict(done)
    return Done(**{name: found[name] for name in Done.__struct_fields__})


def _read_code(body: bytes) -> str:
    """The slug in an engine's error, which goes to the client as it is."""
    return find_code(body) or ReplicaFailedError.code
