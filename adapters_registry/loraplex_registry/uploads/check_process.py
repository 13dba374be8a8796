"""The process that judges uploads, `python -m loraplex_registry.uploads.check_process FD`: a fork for each of them.

It imports everything once and never looks at a file itself: FD brings the socket of each job, and a fork that was made
ahead takes the job from it, judges within limits of memory, time and open files, answers and ends. So no upload meets
a secret, the event loop, or what another one left behind. A fork whose caller has gone is killed with all that it
started.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path

import msgspec

from loraplex_registry.peft import template_process
from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.limit import address_space_bytes, die_with_parent
from loraplex_registry.peft.report import Report
from loraplex_registry.peft.spec import AdapterPlan, BaseSpec

BEGUN = b"+"
"""What a fork sends before it reads its job: from now on what ends it is the job's own fault."""
LENGTH_BYTES = 8
"""Of the job's length, which goes before it."""

_MAX_MEMORY_BYTES = 1 << 30
"""Beyond what the process has at its start; the checks read in pieces, so it does not grow with the files."""
_MAX_CPU_S = 300
_MAX_OPEN_FILES = 128
_MAX_THREADS = min(4, os.cpu_count() or 1)
_NEEDED = (template_process,)
"""Imported here, so that no fork has to."""


class CheckJob(msgspec.Struct, frozen=True):
    """The files to judge by name, their base, and whether an admin forced it."""

    files: dict[str, str]
    base: BaseSpec
    forced_base: bool


class Verdict(msgspec.Struct, frozen=True):
    """What `check_adapter` returned."""

    report: Report
    plan: AdapterPlan | None


def judge(job: CheckJob) -> Verdict:
    """Judge the files of a job in this process."""
    files = {name: Path(path) for name, path in job.files.items()}
    return Verdict(*check_adapter(files, job.base, forced_base=job.forced_base, threads=_MAX_THREADS))


def limit_resources() -> None:
    """Bound this process, and what it starts."""
    for kind, limit in (
        (resource.RLIMIT_AS, address_space_bytes() + _MAX_MEMORY_BYTES),
        (resource.RLIMIT_CPU, _MAX_CPU_S),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        # Not every system knows every limit, and a lower one may hold already.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def main() -> int:
    """Fork for each socket that arrives, until whoever started this is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    return _Forks(control).serve()


class _Forks:
    """The running forks by the descriptor of our copy of their socket, and one that waits for the next job.

    The only one that waits for their ends. A fork shares no socket with another: what it writes, or how long it runs,
    is nothing to the others.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: dict[int, tuple[int, socket.socket]] = {}
        self._spare: tuple[int, socket.socket] | None = None
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> int:
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        os.set_blocking(waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._poll.register(woken, select.POLLIN)
        # a fork ends before there is anything to collect, and looking for it would take half of its time
        gc.collect()
        gc.freeze()
        gc.disable()
        while True:
            self._keep_spare()
            for descriptor, _ in self._poll.poll():
                if descriptor == woken:
                    os.read(woken, 4096)
                    self._reap()
                elif descriptor != self._control.fileno():
                    self._end(descriptor)
                elif not self._take():
                    self._end_all()
                    return 0

    def _take(self) -> bool:
        """Hand the next job to the fork that waits; False if there will be none."""
        data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            return False
        connection = socket.socket(fileno=descriptors[0])
        self._keep_spare()
        if self._spare is None:
            connection.close()
            return True
        pid, line = self._spare
        self._spare = None
        with line, contextlib.suppress(OSError):
            # where it has gone, closing is all that the caller is told
            socket.send_fds(line, [data], [connection.fileno()])
        self._running[connection.fileno()] = (pid, connection)
        # no event is asked for: the end of the caller comes unasked
        self._poll.register(connection, 0)
        return True

    def _keep_spare(self) -> None:
        """Fork for a job that is still to come, if none waits: who brings one need not wait for that."""
        if self._spare is not None:
            return
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return
        if pid == 0:
            for held in (ours, self._control, *(connection for _, connection in self._running.values())):
                held.close()
            _wait_and_answer(theirs)
        theirs.close()
        # both do it, as either may come first
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._spare = (pid, ours)

    def _end(self, descriptor: int) -> None:
        """Kill a fork and its helpers; it is waited for here alone, so that its id is its own."""
        pid, connection = self._running.pop(descriptor)
        self._poll.unregister(connection)
        _kill(pid)
        connection.close()
        os.waitpid(pid, 0)

    def _end_all(self) -> None:
        for running in list(self._running):
            self._end(running)
        if self._spare is not None:
            _kill(self._spare[0])

    def _reap(self) -> None:
        for descriptor, (pid, _) in list(self._running.items()):
            if _has_ended(pid):
                self._end(descriptor)
        if self._spare is not None and _has_ended(self._spare[0]):
            pid, line = self._spare
            self._spare = None
            line.close()
            os.waitpid(pid, 0)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait_and_answer(line: socket.socket) -> None:
    """Wait for a job, answer it and end; end at once if there will be none."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        die_with_parent()
        with line:
            data, descriptors, _, _ = socket.recv_fds(line, 1, 1)
        if not data:
            os._exit(0)
        connection = socket.socket(fileno=descriptors[0])
        limit_resources()
        # Whatever is printed goes to the log, never into the verdict.
        os.dup2(2, 1)
        connection.sendall(BEGUN)
        answer = answer_job(_read_job(connection))
        connection.sendall(answer)
        code = 0
    except MemoryError:
        # the refusal is the caller's; a trace would need memory
        code = 2
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def _read_job(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.read(int.from_bytes(file.read(LENGTH_BYTES), "little"))


def answer_job(data: bytes) -> bytes:
    """Return the verdict on a job, both as JSON."""
    return msgspec.json.encode(judge(msgspec.json.decode(data, type=CheckJob)))


if __name__ == "__main__":
    sys.exit(main())
