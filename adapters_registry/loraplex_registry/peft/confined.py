"""Runs work on hostile text in a process that can be killed: a fork where that is safe, else a new interpreter.

A fork of a process with several threads may wait for ever on a lock that another thread held. So a process with one
thread, such as the checks' own or the command line, forks in a millisecond or two; all others start Python anew.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

Work = Callable[[BinaryIO, BinaryIO], None]
"""Reads a job to its end, writes an answer; sets its own limits before it reads."""

_TASKS = Path("/proc/self/task")
_CHUNK_BYTES = 1 << 16
_END_S = 1.0
_MAX_ANSWER_BYTES = 64 << 20
_RESET_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPROF, signal.SIGVTALRM, signal.SIGALRM)


class Outcome(NamedTuple):
    """What the work wrote before it ended, and how: 0, or the negative number of the signal that ended it."""

    answer: bytes
    code: int
    is_late: bool = False


def run_confined(work: Work, command: Sequence[str], job: bytes, timeout_s: float) -> Outcome:
    """Do `work` on `job` in another process, which is gone when this returns.

    Args:
        work: the function, for a fork.
        command: a program that does the same from standard input to standard output, for a process with threads.
        job: what it reads.
        timeout_s: after which it is killed.

    Raises:
        OSError: no process can be started.
    """
    return _fork(work, job, timeout_s) if _has_one_thread() else _start(command, job, timeout_s)


def _has_one_thread() -> bool:
    try:
        return len(list(_TASKS.iterdir())) == 1
    except OSError:
        return False


def _start(command: Sequence[str], job: bytes, timeout_s: float) -> Outcome:
    try:
        done = subprocess.run(  # noqa: S603
            command, input=job, capture_output=True, timeout=timeout_s, check=False, env=_environment()
        )
    except subprocess.TimeoutExpired:
        return Outcome(b"", -signal.SIGKILL, is_late=True)
    return Outcome(done.stdout, done.returncode)


def _environment() -> dict[str, str]:
    """Where Python finds modules, and nothing else."""
    return {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV") if name in os.environ}


def _fork(work: Work, job: bytes, timeout_s: float) -> Outcome:
    job_out, job_in = os.pipe()
    answer_out, answer_in = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        for descriptor in (job_out, job_in, answer_out, answer_in):
            os.close(descriptor)
        raise
    if pid == 0:
        os.close(job_in)
        os.close(answer_out)
        _work_and_end(work, job_out, answer_in)
    os.close(job_out)
    os.close(answer_in)
    is_late = True
    answer = bytearray()
    try:
        is_late = _exchange(job_in, answer_out, job, answer, time.monotonic() + timeout_s)
    finally:
        os.close(answer_out)
        status = _end(pid, 0.0 if is_late else _END_S)
    return Outcome(bytes(answer), os.waitstatus_to_exitcode(status), is_late)


def _end(pid: int, grace_s: float) -> int:
    """Wait for a child, kill it after a while, and return its status; until then nobody else can have its id."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _work_and_end(work: Work, job_out: int, answer_in: int) -> None:
    code = 1
    try:
        for number in _RESET_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        with os.fdopen(job_out, "rb") as reader, os.fdopen(answer_in, "wb") as writer:
            work(reader, writer)
            writer.flush()
        code = 0
    finally:
        os._exit(code)


def _exchange(job_in: int, answer_out: int, job: bytes, answer: bytearray, deadline: float) -> bool:
    """Write the job, read the answer to its end, and return whether time was up; closes `job_in`."""
    left = memoryview(job)
    os.set_blocking(job_in, False)
    writing = [job_in] if job else []
    try:
        if not writing:
            os.close(job_in)
        while True:
            wait_s = deadline - time.monotonic()
            readable, writable, _ = select.select([answer_out], writing, [], max(wait_s, 0))
            if not readable and not writable:
                return True
            if writable:
                left = _write_some(job_in, left)
                if not left:
                    os.close(job_in)
                    writing = []
            if readable:
                chunk = os.read(answer_out, _CHUNK_BYTES)
                if not chunk:
                    return False
                answer += chunk
                if len(answer) > _MAX_ANSWER_BYTES:
                    return True
    finally:
        if writing:
            os.close(job_in)


def _write_some(descriptor: int, left: memoryview) -> memoryview:
    """Write what fits and return what is left, nothing where nobody reads any more."""
    with contextlib.suppress(BlockingIOError):
        try:
            return left[os.write(descriptor, left[:_CHUNK_BYTES]) :]
        except BrokenPipeError:
            return left[:0]
    return left
