"""Runs checks beside the event loop: at most a few at once, each in a process that is killed when its time is over.

`ProcessChecker` is the only writer of its server, a process that has everything imported and forks for each check. It
starts with the first check and again whenever it is gone or stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from loraplex_registry.errors import UnavailableError
from loraplex_registry.peft.report import Check, build_report
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.peft.unreadable import UNREADABLE
from loraplex_registry.uploads.check_process import BEGUN, LENGTH_BYTES, CheckJob, Verdict

_MODULE = "loraplex_registry.uploads.check_process"
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT")
_START_S = 10.0
_MAX_STARTS = 3
_MAX_ANSWER_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class Checker(Protocol):
    """Judges the files of an upload; changes nothing."""

    async def check(self, files: Mapping[str, Path], base: BaseSpec, *, forced_base: bool, timeout_s: float) -> Verdict:
        """Return the verdict.

        Raises:
            UnavailableError: There is none after `timeout_s` seconds, waiting for a turn included.
        """

    def close(self) -> None:
        """End what still runs."""


class ProcessChecker:
    """Judges in a process each, at most `max_checks` at once."""

    def __init__(self, max_checks: int) -> None:
        self._turns = asyncio.Semaphore(max_checks)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.num_starts = 0

    @property
    def pid(self) -> int | None:
        """The server's process id while there is one."""
        return self._process.pid if self._process is not None else None

    async def check(self, files: Mapping[str, Path], base: BaseSpec, *, forced_base: bool, timeout_s: float) -> Verdict:
        """Return the verdict (see `Checker.check`); files that end the process are refused."""
        job = msgspec.json.encode(build_job(files, base, forced_base=forced_base))
        try:
            async with asyncio.timeout(timeout_s), self._turns:
                answer = await self._judge(job)
        except TimeoutError as error:
            raise _late(timeout_s) from error
        except OSError as error:
            raise UnavailableError(f"no process can be started to check the files: {error}") from error
        # what was cut off is no answer
        with contextlib.suppress(*UNREADABLE):
            return msgspec.json.decode(answer, type=Verdict)
        check = Check(
            "format", "fail", "The files cannot be read within the limits of the checks; save them again.", "files"
        )
        return Verdict(build_report([check]), None)

    def start(self) -> None:
        """Start the server, unless it runs; the first check does it too, and takes longer.

        Raises:
            OSError: It cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        ours.settimeout(0)
        with theirs:
            try:
                self._process = _spawn(theirs.fileno())
            except OSError:
                ours.close()
                raise
        self._control = ours
        self.num_starts += 1

    def close(self) -> None:
        """End the server and what it runs."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    async def _judge(self, job: bytes) -> bytes:
        """Return the answer to a job, empty if the job ended its process."""
        for _ in range(_MAX_STARTS):
            answer = await self._try(job)
            if answer is not None:
                return answer
        raise OSError("the server of the checks does not stay")

    async def _try(self, job: bytes) -> bytes | None:
        """Run a job once; None if the server went away, not the job."""
        connection = self._open()
        if connection is None:
            return None
        process = self._process
        # to close it is to have the fork killed
        with connection:
            if not await self._wait_begun(connection, process):
                return None
            answer = await _exchange(connection, job)
        if answer:
            return answer
        if process is not self._process or (process is not None and process.poll() is not None):
            return None
        _log.warning("the files of an upload ended the process that checked them")
        return b""

    async def _wait_begun(self, connection: socket.socket, process: subprocess.Popen[bytes] | None) -> bool:
        try:
            async with asyncio.timeout(_START_S) as patience:
                has_begun = await _receive(connection, len(BEGUN)) == BEGUN
        except TimeoutError:
            if not patience.expired():
                raise
            has_begun = False
            _log.warning("the server of the checks is stuck and is ended")
        if not has_begun and process is self._process:
            self.close()
        return has_begun

    def _open(self) -> socket.socket | None:
        """Return our end of a new job's socket; None if the server did not take the other one."""
        self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        ours.settimeout(0)
        with theirs:
            try:
                socket.send_fds(self._control, [b"j"], [theirs.fileno()])
            except OSError:
                ours.close()
                self.close()
                return None
        return ours


def build_job(files: Mapping[str, Path], base: BaseSpec, *, forced_base: bool) -> CheckJob:
    """Return what a process is told to judge."""
    return CheckJob({name: str(path) for name, path in files.items()}, base, forced_base)


def _late(timeout_s: float) -> UnavailableError:
    return UnavailableError(
        f"There is no verdict after {timeout_s:g} s and nothing was stored; repeat with a longer ?wait="
    )


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", "-m", _MODULE, str(descriptor)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
        env=_environment(),
        # so that signals for us are not for it
        start_new_session=True,
    )


async def _exchange(connection: socket.socket, job: bytes) -> bytes:
    """Send a job and return what comes back until the end; empty if the fork was ended."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        await loop.sock_sendall(connection, len(job).to_bytes(LENGTH_BYTES, "little") + job)
    return await _receive(connection, _MAX_ANSWER_BYTES)


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


def _environment() -> dict[str, str]:
    """Return no more than Python needs: hostile files never meet a secret."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
