"""The front's side of the core: which requests and calls are open there, and what came back for them.

`CoreClient` is the only writer of that table. `CoreProcess` attaches a link when a core is up and detaches it when the
core is gone, which ends everything that was open with `replica_failed`. A new core is asked, beside its requests, for
the adapters that the last one had.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from loraplex_engine.errors import ConflictError, DrainingError, NotReadyError, ReplicaFailedError
from loraplex_engine.server.generation import build_error
from loraplex_engine.server.resident import Residents
from loraplex_engine.wire.messages import (
    AbortRequest,
    AddRequest,
    Beat,
    CancelParity,
    CoreFailed,
    CoreProgress,
    CoreReady,
    Drain,
    DropAdapter,
    ErrorInfo,
    GetMetrics,
    GetState,
    HookCall,
    LoadAdapter,
    MeasureParity,
    Reply,
    ToCore,
    ToFront,
    TokenEvent,
    TokenEvents,
)

_log = logging.getLogger(__name__)
_MOST_NAMED = 16
_GONE = ErrorInfo(code=ReplicaFailedError.code, message=str(ReplicaFailedError()))

Sink = Callable[[TokenEvent], None]
Call = type[LoadAdapter | DropAdapter | GetState | GetMetrics | Drain | MeasureParity | HookCall]


class _Open(NamedTuple):
    """A request that the core has not let go of."""

    sink: Sink
    digest: str | None


class CoreClient:
    """Adds and aborts requests, makes calls, and hands events to whoever waits for them."""

    def __init__(self) -> None:
        self.facts: CoreReady | None = None
        self.failure: str | None = None
        self.is_draining = False
        self.on_message: Callable[[ToFront], None] = lambda _: None
        """Told of everything that the core says."""
        self._send: Callable[[ToCore], None] | None = None
        self._id_to_open: dict[str, _Open] = {}
        self._residents = Residents()
        self._id_to_return: dict[int, LoadAdapter] = {}
        self._id_to_reply: dict[int, asyncio.Future[Reply]] = {}
        self._call_ids = itertools.count(1)

    @property
    def is_ready(self) -> bool:
        """Whether the core has its model and takes requests."""
        return self.facts is not None and self._send is not None

    @property
    def num_open(self) -> int:
        """Requests that the core has not let go of."""
        return len(self._id_to_open)

    def describe_open(self) -> str:
        """Name the open requests and their adapters, the oldest first, for a log."""
        named = [f"{request_id} ({entry.digest or 'base'})" for request_id, entry in self._id_to_open.items()]
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        return f"{', '.join(named[:_MOST_NAMED])}{more}" if named else "none"

    def get_facts(self) -> CoreReady:
        """Return the model's facts.

        Raises:
            DrainingError: The engine is shutting down.
            NotReadyError: There is no core with a model now.
        """
        if self.is_draining:
            raise DrainingError
        if self.facts is None or self._send is None:
            raise NotReadyError
        return self.facts

    def add(self, request: AddRequest, sink: Sink) -> None:
        """Start one request; see `generation.Core`.

        Raises:
            DrainingError, NotReadyError: As `get_facts`.
            ConflictError: The core still has a request with this id, whose last event would end this one.
        """
        self.get_facts()
        if request.request_id in self._id_to_open:
            raise ConflictError("A request with this id is still being ended; choose a fresh id.")
        # what cannot be sent must leave no sink behind; no event can come before this returns
        self._post(request)
        self._id_to_open[request.request_id] = _Open(sink, request.digest)

    def abort(self, request_id: str, reason: str) -> None:
        """End one request; one that is not open is left alone."""
        if request_id in self._id_to_open:
            self._post(AbortRequest(request_id=request_id, reason=reason))

    async def call(
        self, kind: Call, timeout_s: float, cancel: type[CancelParity] | None = None, **fields: Any
    ) -> dict[str, Any] | bytes | None:
        """Make one call and return the body of its reply; `cancel` is sent where nobody waits for that any more.

        Raises:
            NotReadyError: There is no core now.
            ReplicaFailedError: The core went away or did not answer in time.
            RequestError: The core's own error, with its code.
        """
        if not self.is_ready:
            raise NotReadyError
        call_id = next(self._call_ids)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._id_to_reply[call_id] = reply
        try:
            message = kind(call_id=call_id, **fields)
            self._post(message)
            async with asyncio.timeout(timeout_s):
                answer = await reply
        except TimeoutError as error:
            raise ReplicaFailedError("The engine's core did not answer in time; try again.") from error
        finally:
            del self._id_to_reply[call_id]
            if cancel is not None and not (reply.done() and not reply.cancelled()):
                self._post(cancel(call_id))
        if answer.error is not None:
            raise build_error(answer.error)
        self._note(message)
        return answer.body

    def attach(self, send: Callable[[ToCore], None]) -> None:
        """Use a new core's link; requests are taken once it is ready."""
        self._send = send
        self.failure = None

    def detach(self) -> None:
        """Forget a core that is gone and end what was open there."""
        self._send, self.facts = None, None
        self._id_to_return.clear()
        requests, self._id_to_open = self._id_to_open, {}
        for request_id, entry in requests.items():
            entry.sink(TokenEvent(request_id=request_id, token_ids=[], finish="error", error=_GONE))
        for call_id, reply in self._id_to_reply.items():
            if not reply.done():
                reply.set_result(Reply(call_id=call_id, error=_GONE))

    def receive(self, message: ToFront) -> None:
        """Take one message of the core."""
        match message:
            case TokenEvents(events=events):
                for event in events:
                    self._dispatch(event)
            case Reply(call_id=call_id):
                reply = self._id_to_reply.get(call_id)
                if reply is not None and not reply.done():
                    reply.set_result(message)
                self._settle_return(message)
            case CoreReady():
                self.facts = message
                _log.info("serving %s, %s positions, on %s", message.name, message.max_model_len, message.device)
                self._bring_back()
            case CoreProgress(stage=stage):
                _log.info("%s", stage)
            case CoreFailed(message=text):
                self.failure = text
            case Beat():
                pass
        self.on_message(message)

    def _dispatch(self, event: TokenEvent) -> None:
        entry = self._id_to_open.get(event.request_id)
        if entry is None:
            return
        if event.finish is not None:
            del self._id_to_open[event.request_id]
            if entry.digest is not None and event.error is None:
                self._residents.note(entry.digest)
                self._residents.trim(self.facts.max_loras if self.facts is not None else 0)
        entry.sink(event)

    def _bring_back(self) -> None:
        """Ask a new core for the adapters of the last one; requests do not wait for them."""
        for digest, pin in self._residents.take():
            call = LoadAdapter(next(self._call_ids), digest, pin)
            self._id_to_return[call.call_id] = call
            self._post(call)

    def _settle_return(self, reply: Reply) -> None:
        call = self._id_to_return.pop(reply.call_id, None)
        if call is None:
            return
        if reply.error is None:
            self._note(call)
        else:
            _log.warning("%s was not brought back: %s", call.digest, reply.error.message)

    def _note(self, call: ToCore) -> None:
        if isinstance(call, LoadAdapter):
            self._residents.note(call.digest, pin=call.pin)
        elif isinstance(call, DropAdapter):
            self._residents.forget(call.digest)

    def _post(self, message: ToCore) -> None:
        if self._send is not None:
            self._send(message)
