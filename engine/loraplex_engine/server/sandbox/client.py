"""The front's handle on the sandbox's process: starts it, hands tasks to it, replaces it when it is gone or stuck."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from loraplex_engine.errors import InvalidRequestError, NotReadyError, UnsupportedParameterError
from loraplex_engine.server.constraint.task import GrammarTask
from loraplex_engine.server.sandbox.task import (
    BEGUN,
    MAX_ANSWER_BYTES,
    Inspected,
    InspectTask,
    Refused,
    RenderTask,
    Task,
    Text,
    encode_task,
)
from loraplex_engine.server.sandbox.turn import Turns
from loraplex_registry.peft.limit import MAX_WALL_S
from loraplex_registry.peft.unreadable import UNREADABLE

_Answer = TypeVar("_Answer", Inspected, Text)
_log = logging.getLogger(__name__)
_START_S = 10.0
_MAX_QUEUE_S = 2.0
_GRACE_S = 1.0
_CHUNK_BYTES = 1 << 20
# nothing else of the environment is there to be found
_KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "LC_ALL", "TZ")


class Sandbox:
    """Runs tasks on hostile texts, a few at once; each has its own process and its own limits."""

    def __init__(self, *, max_queue_s: float = _MAX_QUEUE_S) -> None:
        self._turns = Turns(max(2, min(4, os.cpu_count() or 2)), max_queue_s)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.num_starts = 0

    def start(self) -> None:
        """Start the process, unless it runs; the first task does it too, and waits longer."""
        if self._process is not None and self._process.poll() is None:
            return
        self._bury()
        ours, theirs = socket.socketpair()
        ours.settimeout(0)
        with theirs:
            try:
                self._process = self._spawn(theirs.fileno())
            except OSError as error:
                _log.error("the sandbox's process cannot be started: %s", error)
                ours.close()
                return
        self._control = ours
        self.num_starts += 1

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "loraplex_engine.server.sandbox.process", str(descriptor)],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
            env=kept | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            # so that its tasks can be ended with it
            start_new_session=True,
        )

    def close(self) -> None:
        """End the process and what it runs."""
        self._bury()

    @property
    def pid(self) -> int | None:
        """The process's id while there is one."""
        return self._process.pid if self._process is not None else None

    async def inspect(self, source: str, *, tenant_id: str = "") -> Inspected:
        """Return a chat template as code and facts.

        Raises:
            InvalidRequestError: It is no template, or takes too much.
            NotReadyError: There was no place in time.
        """
        return await self._run(InspectTask(source), Inspected, tenant_id)

    async def render(self, task: RenderTask, *, tenant_id: str = "") -> str:
        """Return the prompt's text of a chat. Raises as `inspect`, also where the template refuses the messages."""
        return (await self._run(task, Text, tenant_id)).text

    async def compile(self, task: GrammarTask, *, tenant_id: str = "") -> str:
        """Return a grammar as the core takes it. Raises as `inspect`, also where the grammar cannot be honoured."""
        return (await self._run(task, Text, tenant_id)).text

    async def _run(self, task: Task, kind: type[_Answer], tenant_id: str) -> _Answer:
        payload, body = encode_task(task), None
        async with self._turns.take(tenant_id):
            # also where the limits ended it: on a busy machine time of others is charged to a task, tick by tick
            for _ in range(2):
                body = await self._try(payload, task.param)
                if body:
                    break
        if body is not None:
            return _read_answer(body, kind, task.param)
        raise NotReadyError("The process that prepares chat templates and grammars does not run; try again.")

    async def _try(self, payload: bytes, param: str) -> bytes | None:
        """Run a task once; None if the process went away, not the task."""
        loop = asyncio.get_running_loop()
        connection = self._open()
        if connection is None:
            return None
        with connection:
            process = self._process
            try:
                async with asyncio.timeout(_START_S):
                    has_begun = await _receive(connection, len(BEGUN)) == BEGUN
                if not has_begun:
                    self._bury_if(process)
                    return None
                begun_at = loop.time()
                async with asyncio.timeout(MAX_WALL_S + _GRACE_S):
                    body = await _exchange(connection, payload)
            except TimeoutError:
                _log.warning("the sandbox's process is stuck and is ended")
                self._bury_if(process)
                raise NotReadyError("The machine is too busy to prepare this request; try again.") from None
        if body:
            return body
        if process is not self._process:
            return None
        _log.info("a task of the sandbox was ended by its limits (param %s)", param)
        if loop.time() - begun_at >= MAX_WALL_S:
            raise NotReadyError("The machine is too busy to prepare this request; try again.")
        return b""

    def _open(self) -> socket.socket | None:
        """Return our end of a new task's socket; None if the process did not take the other one."""
        self.start()
        if self._control is None:
            return None
        ours, theirs = socket.socketpair()
        ours.settimeout(0)
        with theirs:
            try:
                socket.send_fds(self._control, [b"t"], [theirs.fileno()])
            except OSError:
                ours.close()
                self._bury()
                return None
        return ours

    def _bury_if(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is self._process:
            self._bury()

    def _bury(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


async def _exchange(connection: socket.socket, payload: bytes) -> bytes:
    """Send a task and return what comes back until the end, empty if the task was ended."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        await loop.sock_sendall(connection, payload)
        connection.shutdown(socket.SHUT_WR)
    return await _receive(connection, MAX_ANSWER_BYTES)


async def _receive(connection: socket.socket, max_bytes: int) -> bytes:
    """Return what arrives until the end, or so many bytes of it."""
    loop = asyncio.get_running_loop()
    chunks: list[bytes] = []
    num_left = max_bytes
    with contextlib.suppress(ConnectionError):
        while num_left and (chunk := await loop.sock_recv(connection, min(num_left, _CHUNK_BYTES))):
            chunks.append(chunk)
            num_left -= len(chunk)
    return b"".join(chunks)


_CODE_TO_ERROR: dict[str, Callable[..., InvalidRequestError]] = {
    "unsupported_parameter": UnsupportedParameterError,
}


def _read_answer(body: bytes, kind: type[_Answer], param: str) -> _Answer:
    if not body:
        raise InvalidRequestError(
            "The process that prepares this was ended: it took more than 250 ms of processor time or 512 MiB of "
            "memory, or it crashed. Make this simpler.",
            param=param,
        )
    try:
        answer = msgspec.msgpack.decode(body, type=kind | Refused)
    except UNREADABLE as error:
        # a task that has broken out may say anything
        raise InvalidRequestError("What was made of this cannot be read; make it simpler.", param=param) from error
    if isinstance(answer, Refused):
        raise _CODE_TO_ERROR.get(answer.code, InvalidRequestError)(answer.message, param=answer.param)
    assert isinstance(answer, kind)
    return answer
