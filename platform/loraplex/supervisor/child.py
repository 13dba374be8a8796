"""One supervised process. `Child` starts it, starts it again when it ends, and stops it; it is the only one to do so.

A child runs in a session of its own, so Ctrl-C reaches the supervisor alone, and the kernel kills it if the supervisor
dies. Its output goes to its log file.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.supervisor.backoff import Backoff
from loraplex_registry.wire.ending import end_tasks

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 4096
# What shells say of a program that they cannot start.
_NOT_STARTED = 127
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass(frozen=True)
class ChildSpec:
    """What to run: `env` is the whole environment of the child and may name secret files."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    log: Path


class Child:
    """A process that is kept running until `stop`."""

    def __init__(self, spec: ChildSpec, on_end: Callable[[str, int, float], None]) -> None:
        """`on_end(name, exit_code, wait_s)` is told of each unplanned end and the wait before the next start."""
        self.spec = spec
        self._on_end = on_end
        self._backoff = Backoff()
        self._process: asyncio.subprocess.Process | None = None
        self._started_at = 0.0
        self._first_byte: int | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process, None while it runs."""
        return self._process.returncode if self._process else None

    @property
    def pid(self) -> int | None:
        """Of the process, None while there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def kill(self) -> None:
        """End the process and what it started, at once."""
        if self.pid is not None:
            kill_session(self.pid)

    async def start(self) -> None:
        """Start the process once; `keep` makes it stay."""
        supervisor_pid = os.getpid()
        with self.spec.log.open("ab") as log:
            if self._first_byte is None:
                self._first_byte = log.seek(0, os.SEEK_END)
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                env=self.spec.env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: _die_with_parent(supervisor_pid),
            )
        self._started_at = time.monotonic()

    def keep(self) -> None:
        """From now on start the process again, after a wait, whenever it ends."""
        self._keeper = asyncio.create_task(self._keep_running())

    async def stop(self, grace_s: float) -> None:
        """Ask the process to end, and kill it and what it started if it has not after `grace_s` seconds."""
        if self._keeper:
            await end_tasks([self._keeper])
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            kill_session(process.pid)
            await process.wait()

    def read_tail(self, num_lines: int = 12) -> str:
        """Return the last lines of its output; what earlier runs left in the log is not shown."""
        with contextlib.suppress(OSError), self.spec.log.open("rb") as log:
            log.seek(max(self._first_byte or 0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
            return "\n".join(line for line in lines[-num_lines:] if line.strip())
        return ""

    async def _keep_running(self) -> None:
        assert self._process is not None, "it was started"
        code = await self._process.wait()
        while True:
            wait_s = self._backoff.next_wait_s(time.monotonic() - self._started_at)
            self._on_end(self.spec.name, code, wait_s)
            await asyncio.sleep(wait_s)
            code = await self._run()

    async def _run(self) -> int:
        """Run it to its end; when it cannot be started (no memory, no handle, full disk) that was its end."""
        try:
            await self.start()
        except OSError as error:
            self._started_at = time.monotonic()
            with contextlib.suppress(OSError), self.spec.log.open("a", encoding="utf-8") as log:
                log.write(f"{self.spec.name} cannot be started: {error}\n")
            return _NOT_STARTED
        assert self._process is not None, "it was started"
        return await self._process.wait()


def kill_session(pid: int) -> None:
    """Kill the session that `pid` leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _die_with_parent(parent_pid: int) -> None:
    """Runs in the child before it becomes its program: ask the kernel for SIGKILL when the supervisor dies."""
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
