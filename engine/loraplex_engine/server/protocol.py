"""uvicorn's HTTP protocol with the bound that it lacks: a client that does not read is cut off."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

WRITE_TIMEOUT_S = 30.0


class BoundedProtocol(HttpToolsProtocol):
    """Aborts a connection whose client takes nothing for `WRITE_TIMEOUT_S`; the app sees a disconnect.

    Closing it instead would wait for the unread bytes and keep the descriptor for as long as the client likes.
    """

    _blocked_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Start the clock: the client has left much unread."""
        super().pause_writing()
        self._blocked_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_clock()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection; what is still unread of its last answer goes with it."""
        self.transport.abort()

    def _stop_clock(self) -> None:
        if self._blocked_timer is not None:
            self._blocked_timer.cancel()
            self._blocked_timer = None
