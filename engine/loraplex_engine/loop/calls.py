"""Calls about adapters that are answered later: warm up a digest, drop a digest. Each has a bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from loraplex_engine.errors import ConflictError, LoadTimeoutError, RequestError
from loraplex_engine.lora.residency import Residency
from loraplex_engine.wire.messages import DropAdapter, ErrorInfo, LoadAdapter, Reply


@dataclass(frozen=True, slots=True)
class _Pending:
    call: LoadAdapter | DropAdapter
    expires_at: float
    is_overtaken: bool = False


class AdapterCalls:
    """Pending `LoadAdapter` and `DropAdapter` calls of the core's loop."""

    def __init__(self, residency: Residency, timeout_s: float, clock: Callable[[], float]) -> None:
        self._residency = residency
        self._timeout_s = timeout_s
        self._clock = clock
        self._pending: list[_Pending] = []

    @property
    def is_pending(self) -> bool:
        """Whether a call waits for its answer."""
        return bool(self._pending)

    def add(self, call: LoadAdapter | DropAdapter) -> None:
        """Begin what the call asks for; a drop ends the loads of its digest that came before it."""
        if isinstance(call, LoadAdapter):
            self._residency.welcome(call.digest, forgives=call.forgive)
            self._residency.prefetch(call.digest)
        else:
            self._residency.drop(call.digest)
            self._pending = [_overtake(pending, call.digest) for pending in self._pending]
        self._pending.append(_Pending(call, self._clock() + self._timeout_s))

    def settle(self) -> list[Reply]:
        """Answers of the calls that have come to their end."""
        answered = [(pending, self._find_answer(pending)) for pending in self._pending]
        self._pending = [pending for pending, reply in answered if reply is None]
        return [reply for _, reply in answered if reply is not None]

    def _find_answer(self, pending: _Pending) -> Reply | None:
        call = pending.call
        if pending.is_overtaken:
            info = ErrorInfo(ConflictError.code, "The adapter was dropped while it was on its way.")
            return Reply(call.call_id, error=info)
        reply = self._try_load(call) if isinstance(call, LoadAdapter) else self._try_drop(call)
        if reply is None and self._clock() >= pending.expires_at:
            return _refuse(call.call_id, LoadTimeoutError("The adapter is still in use, or every slot is; try again."))
        return reply

    def _try_load(self, call: LoadAdapter) -> Reply | None:
        if call.pin is False:
            # also of what is not served any more
            self._residency.keep(call.digest, is_kept=False)
        failure = self._residency.find_failure(call.digest)
        if failure is not None:
            return _refuse(call.call_id, failure)
        slot_id = self._residency.try_make_ready(call.digest)
        if slot_id is None:
            self._residency.prefetch(call.digest)
            return None
        if call.pin is not None:
            self._residency.keep(call.digest, is_kept=call.pin)
        is_pinned = self._residency.slots.slots[slot_id].keep
        return Reply(call.call_id, {"digest": call.digest, "slot": slot_id, "pinned": is_pinned})

    def _try_drop(self, call: DropAdapter) -> Reply | None:
        if self._residency.is_draining(call.digest):
            return None
        return Reply(call.call_id, {"digest": call.digest})


def _overtake(pending: _Pending, digest: str) -> _Pending:
    is_load = isinstance(pending.call, LoadAdapter) and pending.call.digest == digest
    return replace(pending, is_overtaken=True) if is_load else pending


def _refuse(call_id: int, error: RequestError) -> Reply:
    return Reply(call_id, error=ErrorInfo(error.code, str(error), error.retry_after_s))
