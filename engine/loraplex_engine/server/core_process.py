"""Starts the core process, joins it by two sockets, and starts it again when it dies or gets stuck.

`CoreProcess` owns the process and its sockets. Secrets go to the core through its standard input; the
kernel kills the core when the front dies, however that happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from loraplex_engine.config import CoreLaunch
from loraplex_engine.errors import StartupError
from loraplex_engine.server.core_client import CoreClient
from loraplex_engine.server.socket_folder import socket_folder
from loraplex_engine.server.watchdog import Watchdog
from loraplex_engine.wire import messages
from loraplex_registry.wire.ending import end_tasks

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_LAST_WORDS_S = 0.3
_STOP_S = 5.0
_MAX_BACKOFF_S = 60.0
_STABLE_S = 60.0
_TICK_S = 1.0
TRACE_SIGNAL = signal.SIGUSR1
"""The core answers it with the stacks of its threads on standard error."""
# resolved before the fork, since the child may not import
_libc = ctypes.CDLL(None, use_errno=True)

BuildLaunch = Callable[[str, str], CoreLaunch]


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies. Runs between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class CoreLink:
    """Two bound sockets to one core: a queue of messages out, a stream of messages in."""

    def __init__(self, context: zmq.asyncio.Context, folder: Path, number: int) -> None:
        self.to_core = f"ipc://{folder}/{number}-to-core"
        self.to_front = f"ipc://{folder}/{number}-to-front"
        self._out = context.socket(zmq.PUSH)
        self._in = context.socket(zmq.PULL)
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        for socket, endpoint in ((self._out, self.to_core), (self._in, self.to_front)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(endpoint)

    def send(self, message: messages.ToCore) -> None:
        """Queue one message; it goes out in order."""
        self._queue.put_nowait(messages.encode(message))

    async def pump(self, receive: Callable[[messages.ToFront], None]) -> None:
        """Carry messages both ways until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump_out())
            group.create_task(self._pump_in(receive))

    async def _pump_out(self) -> None:
        while True:
            await self._out.send(await self._queue.get())

    async def _pump_in(self, receive: Callable[[messages.ToFront], None]) -> None:
        while True:
            receive(messages.decode_to_front(await self._in.recv()))

    def close(self) -> None:
        """Close both sockets."""
        self._out.close()
        self._in.close()


class CoreProcess:
    """Keeps one core running: `run` it as a task, `stop` it at the end."""

    def __init__(
        self,
        command: Sequence[str],
        build_launch: BuildLaunch,
        client: CoreClient,
        *,
        step_timeout_s: float = 60.0,
        tick_s: float = _TICK_S,
    ) -> None:
        self.num_restarts = 0
        self.num_stuck = 0
        """Cores that were ended because they had fallen silent."""
        self._step_timeout_s = step_timeout_s
        self._tick_s = tick_s
        self._command = command
        self._build_launch = build_launch
        self._client = client
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """The core's process id while there is one."""
        return self._process.pid if self._process is not None else None

    async def run(self) -> None:
        """Run cores one after another until stopped.

        Raises:
            StartupError: The first core could not load its model; its own words are the message.
        """
        with socket_folder() as folder:
            context = zmq.asyncio.Context()
            try:
                await self._run_all(context, folder)
            finally:
                context.destroy(linger=0)

    async def stop(self) -> None:
        """End the core: politely, then by force."""
        self._is_stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _run_all(self, context: zmq.asyncio.Context, folder: Path) -> None:
        loop, backoff_s, was_ready = asyncio.get_running_loop(), 1.0, False
        while not self._is_stopping:
            started_at = loop.time()
            is_ready, code = await self._run_once(context, folder)
            was_ready = was_ready or is_ready
            if self._is_stopping:
                return
            reason = self._client.failure or f"the core process ended with code {code}"
            if not was_ready:
                raise StartupError(reason)
            backoff_s = 1.0 if loop.time() - started_at > _STABLE_S else backoff_s
            _log.error("%s; starting it again in %.0f s", reason, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            self.num_restarts += 1

    async def _run_once(self, context: zmq.asyncio.Context, folder: Path) -> tuple[bool, int]:
        """Run one core to its end; return whether it ever served, and its exit code."""
        link = CoreLink(context, folder, self.num_restarts)
        pump = asyncio.create_task(link.pump(self._client.receive))
        try:
            self._client.attach(link.send)
            _log.info("starting the core")
            self._process = process = await self._spawn(self._build_launch(link.to_core, link.to_front))
            exit_code = asyncio.create_task(process.wait())
            watch = asyncio.create_task(self._watch(process))
            await asyncio.wait((exit_code, pump), return_when=asyncio.FIRST_COMPLETED)
            watch.cancel()
            # what the core said last may still be on its way
            await asyncio.sleep(_LAST_WORDS_S)
            if process.returncode is None:
                _log.error("the core process sends what nobody can read")
                process.kill()
            return self._client.facts is not None, await exit_code
        finally:
            await end_tasks([pump])
            link.close()
            self._client.detach()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """End a core that serves and has fallen silent; one that still starts may take its time."""
        watchdog = Watchdog(self._step_timeout_s, self._tick_s)

        def hear(message: messages.ToFront) -> None:
            watchdog.hear(message.patience_s if isinstance(message, messages.Beat) else 0.0)

        self._client.on_message = hear
        while True:
            await asyncio.sleep(self._tick_s)
            if watchdog.tick() and self._client.is_ready:
                break
        self.num_stuck += 1
        _log.error(
            "the core has been silent for more than %.0f s: it is stuck and is ended; open requests: %s",
            self._step_timeout_s,
            self._client.describe_open(),
        )
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(TRACE_SIGNAL)
            await asyncio.sleep(_LAST_WORDS_S)
            process.kill()

    async def _spawn(self, launch: CoreLaunch) -> asyncio.subprocess.Process:
        environment = {name: value for name, value in os.environ.items() if not _is_secret(name)}
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            env=environment,
            # Ctrl-C in a terminal is the front's business
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(launch))
            await process.stdin.drain()
            process.stdin.close()
        return process


def _is_secret(name: str) -> bool:
    return name.removesuffix("_FILE") in ("LORAPLEX_ENGINE_KEY", "LORAPLEX_VERIFY_KEYS")
