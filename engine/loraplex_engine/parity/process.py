"""The core's handle on the process that computes a reference: starts it, looks whether it is done, kills it."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

import msgspec

from loraplex_engine.parity.job import ParityFailed, ParityJob, ParityOutcome
from loraplex_registry.peft.unreadable import UNREADABLE

_decode = msgspec.msgpack.Decoder(ParityOutcome).decode
_NONSENSE = ParityFailed("The process that computes the reference said what cannot be read; try again.")
_DIED = ParityFailed("The process that computes the reference died; try again.")

# to the background before the imports, which take longer than all that comes before them
_PROGRAM = """
import os
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
except (AttributeError, OSError):
    pass
from loraplex_engine.parity.worker import main
raise SystemExit(main())
"""
_ending: list[subprocess.Popen[bytes]] = []
"""Killed and not yet gone."""


class ReferenceProcess:
    """One job in a process of its own, which gets only what the steps leave over of the cores."""

    def __init__(self, job: ParityJob, descriptor: int) -> None:
        """Start it.

        Args:
            job: what to compute.
            descriptor: the file of the engine's logits; stays the caller's.

        Raises:
            OSError: The machine has no room for another process.
        """
        ours, theirs = Pipe()
        with theirs:
            argv = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            self._process = subprocess.Popen(  # noqa: S603
                argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=env
            )
        self._pipe: Connection[bytes, bytes] = ours
        try:
            ours.send_bytes(msgspec.msgpack.encode(job))
            send_handle(ours, descriptor, None)  # the process id matters on Windows only
        except OSError:
            self.close()
            raise

    def poll(self) -> ParityOutcome | None:
        """What came out; None while it computes."""
        try:
            return _decode(self._pipe.recv_bytes()) if self._pipe.poll(0) else None
        except (EOFError, OSError):
            return _DIED
        except UNREADABLE:
            return _NONSENSE

    def close(self) -> None:
        """End it, whatever it is doing, without waiting: at SCHED_IDLE beside busy cores even dying takes a while."""
        self._pipe.close()
        self._process.kill()
        _ending.append(self._process)
        _ending[:] = [process for process in _ending if process.poll() is None]
