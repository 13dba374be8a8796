"""What tests may do past the checks: bind a folder, poison what nobody uses, kill a request in the middle.

Exists only in a core that was started with LORAPLEX_TEST_HOOKS=1. `Hooks` is the one that remembers whom to kill.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from loraplex_engine.engine import Engine
from loraplex_engine.errors import EngineError, InvalidRequestError, StepFailedError
from loraplex_engine.lora.disk import AdapterDisk
from loraplex_engine.wire.messages import (
    BindFolder,
    ErrorInfo,
    HookCall,
    KillRequest,
    PoisonFree,
    Reply,
    SpoilSlot,
    TokenEvent,
)

TOLERATED = ("non_finite",)
"""Checks that an adapter may fail here: those of values. What has no shape or no room cannot be bound by anyone."""

_MAX_DOOMED = 1024


class Hooks:
    """The test hooks of one core's loop."""

    def __init__(self, engine: Engine, disk: AdapterDisk) -> None:
        self._engine = engine
        self._disk = disk
        self._doomed: OrderedDict[str, int] = OrderedDict()

    def answer(self, call: HookCall) -> Reply:
        """Do what a call asks for; whatever goes wrong is the answer."""
        try:
            return Reply(call.call_id, self._run(call))
        except EngineError as error:
            return Reply(call.call_id, error=ErrorInfo(error.code, str(error)))
        except OSError as error:
            message = f"The folder cannot be read: {error.strerror}."
            return Reply(call.call_id, error=ErrorInfo(InvalidRequestError.code, message))

    def kill_doomed(self) -> list[TokenEvent]:
        """End the requests whose time has come; called after every step."""
        scheduler = self._engine.scheduler
        found = [
            (request, doomed_id)
            for request in scheduler.running
            if (doomed_id := _public_id(request.request_id)) in self._doomed
            and len(request.output_ids) >= self._doomed[doomed_id]
        ]
        error = StepFailedError("A test ended this request.")
        events = [self._engine.fail(request.request_id, error) for request, _ in found]
        for _, doomed_id in found:
            self._doomed.pop(doomed_id, None)
        return [event for event in events if event is not None]

    def _run(self, call: HookCall) -> dict[str, str | int]:
        match call:
            case BindFolder(path=path):
                return {"digest": self._bind(path)}
            case PoisonFree():
                num_blocks, num_slots = self._engine.poison()
                return {"kv_blocks": num_blocks, "slots": num_slots}
            case KillRequest(request_id=request_id, after_tokens=after_tokens):
                self._doom(request_id, after_tokens)
                return {"id": request_id, "after_tokens": after_tokens}
            case SpoilSlot(digest=digest):
                if not self._engine.residency.spoil(digest):
                    raise InvalidRequestError("`digest` must be that of an adapter in host memory.")
                return {"digest": digest}

    def _bind(self, path: str) -> str:
        folder = Path(path)
        if not folder.is_absolute() or not folder.is_dir():
            raise InvalidRequestError("`path` must be the absolute path of a folder on the engine's machine.")
        return self._disk.put(folder)

    def _doom(self, request_id: str, after_tokens: int) -> None:
        if after_tokens < 0:
            raise InvalidRequestError("`after_tokens` must be 0 or more.")
        self._doomed[request_id] = after_tokens
        if len(self._doomed) > _MAX_DOOMED:
            self._doomed.popitem(last=False)


def _public_id(request_id: str) -> str:
    """Id that the gateway knows; the front adds `-` and the choice's number."""
    return request_id.rpartition("-")[0]
