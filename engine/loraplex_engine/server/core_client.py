"""The front's side of the core: which requests and calls are open there, and what came back for them.

`CoreClient` is the only writer of that table. `CoreProcess` attaches a link when a core is up and detaches it when the
core is gone, which ends everything that was open with `replica_failed`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

from loraplex_engine.errors import DrainingError, NotReadyError, ReplicaFailedError
from loraplex_engine.server.generation import build_error
from loraplex_engine.wire.messages import (
    AbortRequest,
    AddRequest,
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
    Reply,
    ToCore,
    ToFront,
    TokenEvent,
    TokenEvents,
)

_log = logging.getLogger(__name__)
_GONE = ErrorInfo(code=ReplicaFailedError.code, message=str(ReplicaFailedError()))

Sink = Callable[[TokenEvent], None]
Call = type[LoadAdapter | DropAdapter | GetState | GetMetrics | Drain | HookCall]


class CoreClient:
    """Adds and aborts requests, makes calls, and hands events to whoever waits for them."""

    def __init__(self) -> None:
        self.facts: CoreReady | None = None
        self.failure: str | None = None
        self.is_draining = False
        self._send: Callable[[ToCore], None] | None = None
        self._id_to_sink: dict[str, Sink] = {}
        self._id_to_reply: dict[int, asyncio.Future[Reply]] = {}
        self._call_ids = itertools.count(1)

    @property
    def is_ready(self) -> bool:
        """Whether the core has its model and takes requests."""
        return self.facts is not None and self._send is not None

    @property
    def num_open(self) -> int:
        """Requests that the core has not let go of."""
        return len(self._id_to_sink)

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
        """Start one request; see `generation.Core`. Raises as `get_facts`."""
        self.get_facts()
        # what cannot be sent must leave no sink behind; no event can come before this returns
        self._post(request)
        self._id_to_sink[request.request_id] = sink

    def abort(self, request_id: str, reason: str) -> None:
        """End one request; one that is not open is left alone."""
        if request_id in self._id_to_sink:
            self._post(AbortRequest(request_id=request_id, reason=reason))

    async def call(self, kind: Call, timeout_s: float, **fields: Any) -> dict[str, Any] | bytes | None:
        """Make one call and return the body of its reply.

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
            self._post(kind(call_id=call_id, **fields))
            async with asyncio.timeout(timeout_s):
                answer = await reply
        except TimeoutError as error:
            raise ReplicaFailedError("The engine's core did not answer in time; try again.") from error
        finally:
            del self._id_to_reply[call_id]
        if answer.error is not None:
            raise build_error(answer.error)
        return answer.body

    def attach(self, send: Callable[[ToCore], None]) -> None:
        """Use a new core's link; requests are taken once it is ready."""
        self._send = send
        self.failure = None

    def detach(self) -> None:
        """Forget a core that is gone and end what was open there."""
        self._send, self.facts = None, None
        sinks, self._id_to_sink = self._id_to_sink, {}
        for request_id, sink in sinks.items():
            sink(TokenEvent(request_id=request_id, token_ids=[], finish="error", error=_GONE))
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
            case CoreReady():
                self.facts = message
                _log.info("serving %s, %s positions, on %s", message.name, message.max_model_len, message.device)
            case CoreProgress(stage=stage):
                _log.info("%s", stage)
            case CoreFailed(message=text):
                self.failure = text

    def _dispatch(self, event: TokenEvent) -> None:
        sink = self._id_to_sink.get(event.request_id)
        if sink is None:
            return
        if event.finish is not None:
            del self._id_to_sink[event.request_id]
        sink(event)

    def _post(self, message: ToCore) -> None:
        if self._send is not None:
            self._send(message)
