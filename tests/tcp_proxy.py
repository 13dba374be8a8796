"""A proxy on the loopback that does to one server's connections what networks do: late, silent, cut, cut short, gone.

`TcpProxy` lives in the event loop of the test. Its fault may change at any moment and holds for open connections too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass

_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class Fault:
    """What is wrong with the way; nothing by default.

    A connection ends once so many bytes have come from the server: `reset_after` breaks it, `end_after` closes it as if
    that had been all.
    """

    delay_s: float = 0.0
    """Of each piece, each way."""
    is_silent: bool = False
    """Connections are taken, and nothing passes."""
    is_gone: bool = False
    """No connection is taken, and there is none."""
    reset_after: int | None = None
    end_after: int | None = None


NONE = Fault()


class TcpProxy:
    """Carries the bytes of one server, at `port` of the loopback."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.num_connections = 0
        """Taken so far."""
        self._target_port = target_port
        self._fault = NONE
        self._is_passing = asyncio.Event()
        self._is_passing.set()
        self._server: asyncio.Server | None = None
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()

    async def start(self) -> None:
        """Listen, on the same port in all its lives."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Take no connection any more, and break those that there are."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()
        await asyncio.sleep(0)

    async def suffer(self, fault: Fault) -> None:
        """From now on this is wrong; `NONE` heals."""
        self._fault = fault
        if fault.is_silent:
            self._is_passing.clear()
        else:
            self._is_passing.set()
        if fault.is_gone:
            await self.stop()
        elif self._server is None:
            await self.start()

    def cut(self) -> None:
        """Break every connection, once."""
        for pair in tuple(self._pairs):
            for writer in pair:
                _reset(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        await self._is_passing.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            _reset(writer)
            return
        pair = (writer, far_writer)
        self._pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer))
                group.create_task(self._pump_back(far_reader, writer))
        except* (OSError, _CutShort):
            for end in pair:
                _reset(end)
        finally:
            self._pairs.discard(pair)
            for end in pair:
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self._pass(data, writer)
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()

    async def _pump_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_bytes = 0
        while data := await reader.read(_CHUNK_BYTES):
            limit = min(x for x in (self._fault.reset_after, self._fault.end_after, 1 << 62) if x is not None)
            await self._pass(data[: max(0, limit - num_bytes)], writer)
            num_bytes += len(data)
            if num_bytes > limit:
                if self._fault.end_after is not None:
                    writer.close()
                raise _CutShort
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()

    async def _pass(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        if self._fault.delay_s:
            await asyncio.sleep(self._fault.delay_s)
        await self._is_passing.wait()
        if data:
            writer.write(data)
            await writer.drain()


class _CutShort(Exception):
    """So many bytes were let through."""


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection, so that its peer sees a reset and not an end; nothing if it is closing already."""
    if writer.transport.is_closing():
        return
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
