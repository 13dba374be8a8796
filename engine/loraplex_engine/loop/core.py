"""The core's loop: messages in, steps, events out. One thread; between steps it hears everything that has arrived.

Knows sockets and the engine, nothing of HTTP or text. Idle, it sleeps on its sockets.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq

from loraplex_engine.config import CoreLaunch
from loraplex_engine.core.request import Request
from loraplex_engine.errors import EngineError, RequestError
from loraplex_engine.loop.calls import AdapterCalls
from loraplex_engine.loop.machine import read_process_bytes
from loraplex_engine.loop.preparation import prepare
from loraplex_engine.wire import messages as wire

if TYPE_CHECKING:
    from loraplex_engine.engine import Engine
    from loraplex_engine.loop.hooks import Hooks
    from loraplex_engine.loop.parity import ParityCalls

_log = logging.getLogger(__name__)
_MAX_IDLE_MS = 200
_WAITING_MS = 10
_LATE_MS = 1
_CHECK_EVERY_S = 10.0

_LOAD_PATIENCE_S = 0.2
_BEAT_EVERY_S = 1.0
_COMPILE_S = 600.0
"""How long the first step of a kind may take, since code may be compiled for it."""

_GATHER_MS, _MAX_GATHER_S = 2, 0.010
"""How long an idle core waits for more requests after each one, and in all: clients that ask at once share a step."""

_REST_SHARE, _MAX_REST_S = 0.12, 0.01
"""A step that rests for loads lasts at most this share longer, and this many seconds."""


def run_core(launch: CoreLaunch) -> int:
    """Build the engine, tell the front, and serve until told to drain or until the front is gone.

    Returns:
        The exit code: 0, or 3 when the engine cannot start.
    """
    # compiled ops are kept where the flag says, also for code that only knows the setting
    os.environ["LORAPLEX_CACHE_DIR"] = launch.config.cache_dir
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(launch.to_core)
    outbox.connect(launch.to_front)

    def send(message: wire.ToFront) -> None:
        outbox.send(wire.encode(message))

    try:
        preparation = prepare(launch.config)
        # takes a second
        send(wire.CoreProgress("importing PyTorch"))
        from loraplex_engine.loop.assembly import build_engine, build_hooks, build_loader_process, build_parity

        engine = build_engine(
            launch.config,
            build_loader_process(launch.config, launch.engine_key),
            lambda stage: send(wire.CoreProgress(stage)),
            preparation,
        )
    except (EngineError, MemoryError, OSError) as error:
        send(wire.CoreFailed(str(error) or type(error).__name__))
        outbox.close(linger=2000)
        return 3
    send(engine.facts)
    parity = build_parity(launch.config, engine, launch.engine_key)
    hooks = build_hooks(launch.config, engine)
    CoreLoop(engine, inbox, send, launch.config.adapter_load_timeout_s, hooks, parity).run()
    return 0


class CoreLoop:
    """Drives one engine from one inbox."""

    def __init__(
        self,
        engine: Engine,
        inbox: zmq.Socket[bytes],
        send: Callable[[wire.ToFront], None],
        call_timeout_s: float,
        hooks: Hooks | None = None,
        parity: ParityCalls | None = None,
    ) -> None:
        self._engine = engine
        self._hooks = hooks
        self._parity = parity
        self._inbox = inbox
        self._send = send
        self._calls = AdapterCalls(engine.residency, call_timeout_s, time.monotonic)
        self._checked_at = 0.0
        self._beat_at = 0.0
        engine.on_new_kind = lambda: send(wire.Beat(_COMPILE_S))
        self._drain_calls: list[int] = []

    def run(self) -> None:
        """Serve for ever; the process ends with its parent."""
        with self._engine.inference():
            while True:
                self.turn()

    def turn(self) -> None:
        """Hear what has arrived, make one step, tell what came of it."""
        self._hear(self._patience_ms())
        self._beat()
        started_at = time.monotonic()
        events = self._engine.step()
        if self._hooks is not None:
            events += self._hooks.kill_doomed()
        replies = self._calls.settle()
        if self._parity is not None:
            events = self._parity.take(events)
            replies += self._parity.settle()
        if events:
            self._send(wire.TokenEvents(events))
        for reply in replies:
            self._send(reply)
        if self._drain_calls and not self._engine.has_requests:
            for call_id in self._drain_calls:
                self._send(wire.Reply(call_id, {"drained": True}))
            self._drain_calls.clear()
        self._leave_room_for_loads(time.monotonic() - started_at)
        self._check_when_idle()

    def _beat(self) -> None:
        """Let the front know now and then that the loop goes round."""
        if time.monotonic() - self._beat_at > _BEAT_EVERY_S:
            self._send(wire.Beat())
            self._beat_at = time.monotonic()

    def _leave_room_for_loads(self, step_s: float) -> None:
        """Rest a little after a step for a load that gets nowhere, or a reference: both have what is left over."""
        is_waited_for = self._engine.residency.oldest_load_s > _LOAD_PATIENCE_S or (
            self._parity is not None and self._parity.is_computing
        )
        if self._engine.has_running and is_waited_for:
            time.sleep(min(_MAX_REST_S, _REST_SHARE * step_s))

    def _check_when_idle(self) -> None:
        """Assert now and then that nothing leaked; a core that has lost count ends, and its front starts another."""
        if not self._engine.has_requests and time.monotonic() - self._checked_at > _CHECK_EVERY_S:
            self._engine.check_integrity()
            self._checked_at = time.monotonic()

    def _patience_ms(self) -> int:
        """How long to sleep for want of work; a message wakes it earlier, a finished load is seen at the next look."""
        if self._engine.has_running:
            return 0
        if self._engine.scheduler.guided.num_late:
            return _LATE_MS
        is_pending = self._calls.is_pending or (self._parity is not None and self._parity.is_pending)
        return _WAITING_MS if self._engine.has_requests or is_pending else _MAX_IDLE_MS

    def _hear(self, patience_ms: int) -> None:
        was_idle = not self._engine.has_requests
        self._inbox.poll(patience_ms)
        gather_until = time.monotonic() + _MAX_GATHER_S
        events: list[wire.TokenEvent] = []
        while self._inbox.poll(_GATHER_MS if was_idle and self._gathers(gather_until) else 0):
            event = self._handle(wire.decode_to_core(self._inbox.recv()))
            if event is not None:
                events.append(event)
        if events:
            self._send(wire.TokenEvents(events))

    def _gathers(self, until: float) -> bool:
        return self._engine.has_requests and time.monotonic() < until

    def _handle(self, message: wire.ToCore) -> wire.TokenEvent | None:
        match message:
            case wire.AddRequest():
                return self._add(message)
            case wire.AbortRequest():
                return self._engine.abort(message.request_id, message.reason)
            case wire.LoadAdapter() | wire.DropAdapter():
                self._calls.add(message)
            case wire.MeasureParity():
                assert self._parity is not None
                self._parity.add(message)
            case wire.CancelParity():
                if self._parity is not None:
                    self._parity.cancel(message.call_id)
            case wire.Drain():
                self._engine.scheduler.is_draining = True
                self._drain_calls.append(message.call_id)
            case _:
                self._send(self._answer(message))
        return None

    def _add(self, message: wire.AddRequest) -> wire.TokenEvent | None:
        request = Request(
            message.request_id,
            message.prompt_ids,
            message.params,
            message.digest,
            message.tenant_id,
            message.priority,
            deadline_at=time.monotonic() + message.deadline_s,
            cache_salt=message.cache_salt,
            weight=message.weight,
        )
        try:
            self._engine.add(request)
        except RequestError as error:
            info = wire.ErrorInfo(error.code, str(error), error.retry_after_s)
            return wire.TokenEvent(message.request_id, [], "error", info, request.stats(time.monotonic()))
        return None

    def _answer(self, message: wire.GetState | wire.GetMetrics | wire.HookCall) -> wire.Reply:
        try:
            if isinstance(message, wire.HookCall):
                assert self._hooks is not None, "the front has no route for it either"
                return self._hooks.answer(message)
            body: dict[str, Any] | bytes
            body = self._state() if isinstance(message, wire.GetState) else self._engine.metrics.to_text()
        except Exception as error:  # noqa: BLE001 - a failed look must not end the requests
            _log.error("cannot answer %s: %s", type(message).__name__, traceback.format_exc())
            return wire.Reply(message.call_id, error=wire.ErrorInfo("internal_error", type(error).__name__))
        return wire.Reply(message.call_id, body)

    def _state(self) -> dict[str, Any]:
        memory = {**self._engine.facts.memory, "process_bytes": read_process_bytes()}
        return {**self._engine.state(), "memory": memory, "is_draining": self._engine.scheduler.is_draining}
