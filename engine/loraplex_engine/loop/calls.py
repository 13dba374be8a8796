"""Calls about adapters that are answered later: warm up a digest, drop a digest."""

from __future__ import annotations

from loraplex_engine.lora.residency import Residency
from loraplex_engine.wire.messages import DropAdapter, ErrorInfo, LoadAdapter, Reply


class AdapterCalls:
    """Pending `LoadAdapter` and `DropAdapter` calls of the core's loop."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._loads: list[LoadAdapter] = []
        self._drops: list[DropAdapter] = []

    @property
    def is_pending(self) -> bool:
        """Whether a call waits for its answer."""
        return bool(self._loads or self._drops)

    def load(self, call: LoadAdapter) -> None:
        """Begin to make a digest resident."""
        self._residency.prefetch(call.digest)
        self._loads.append(call)

    def drop(self, call: DropAdapter) -> None:
        """Begin to drain a digest."""
        self._residency.drop(call.digest)
        self._drops.append(call)

    def settle(self) -> list[Reply]:
        """Answers of the calls that have come to their end."""
        loads = [(call, self._try_load(call)) for call in self._loads]
        drops = [(call, self._try_drop(call)) for call in self._drops]
        self._loads = [call for call, reply in loads if reply is None]
        self._drops = [call for call, reply in drops if reply is None]
        return [reply for _, reply in [*loads, *drops] if reply is not None]

    def _try_load(self, call: LoadAdapter) -> Reply | None:
        failure = self._residency.find_failure(call.digest)
        if failure is not None:
            return Reply(call.call_id, error=ErrorInfo(failure.code, str(failure), failure.retry_after_s))
        slot_id = self._residency.try_make_ready(call.digest)
        if slot_id is None:
            return None
        self._residency.keep(call.digest, is_kept=call.pin)
        return Reply(call.call_id, {"digest": call.digest, "slot": slot_id, "pinned": call.pin})

    def _try_drop(self, call: DropAdapter) -> Reply | None:
        return Reply(call.call_id, {"digest": call.digest}) if self._residency.is_gone(call.digest) else None
