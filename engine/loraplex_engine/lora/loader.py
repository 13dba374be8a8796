"""The core's handle on the loader process: starts it, sends jobs, takes results, replaces it when it dies or hangs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import msgspec

from loraplex_engine.lora.packed import (
    LoadBeat,
    LoadDone,
    LoaderMessage,
    LoadFailed,
    LoadJob,
    PackedAdapter,
    map_packed,
)
from loraplex_engine.lora.worker import WorkerLaunch
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.peft.unreadable import UNREADABLE

_MAX_BACKOFF_S = 30.0
_DIED = "The loader process died and is restarted."
_NONSENSE = "The loader process said what cannot be read and is restarted."
_decode = msgspec.msgpack.Decoder(LoaderMessage).decode
_log = logging.getLogger(__name__)


class LoaderProcess:
    """`Loader` over a helper process and a socket pair, which leaves no file behind however either side ends.

    A process that has jobs and is silent for more than `silence_s` seconds is stuck, and is ended.
    """

    def __init__(
        self,
        *,
        cache_dir: str,
        base: BaseSpec,
        base_dir: str,
        dtype: str,
        registry_url: str = "",
        engine_key: str = "",
        max_disk_bytes: int,
        tolerated: tuple[str, ...] = (),
        silence_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launch = WorkerLaunch(
            cache_dir, base, base_dir, dtype, registry_url, engine_key, max_disk_bytes, tolerated
        )
        self._silence_s = silence_s
        self._clock = clock
        self._heard_at = clock()
        self._in_flight: set[str] = set()
        self._reason = _DIED
        self._num_deaths = 0
        self._restart_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[bytes, bytes] | None = None
        self._spawn()

    def start(self, digest: str) -> None:
        """Begin to load; returns at once. While the process is away the job fails at the next `take_finished`."""
        if not self._in_flight:
            self._heard_at = self._clock()
        self._in_flight.add(digest)
        if self._pipe is not None:
            try:
                self._pipe.send_bytes(msgspec.msgpack.encode(LoadJob(digest)))
            except OSError:
                self._bury()

    def take_finished(self) -> list[PackedAdapter | LoadFailed]:
        """Results since the last call; when the process has died or hangs, its jobs come back as failed."""
        results = self._receive()
        if self._pipe is not None and self._in_flight and self._clock() - self._heard_at > self._silence_s:
            _log.error("the loader has been silent for more than %.0f s: it is stuck and is ended", self._silence_s)
            self._bury()
        if self._pipe is None:
            results += [_fail(digest, self._reason) for digest in sorted(self._in_flight)]
            self._in_flight.clear()
            if self._clock() >= self._restart_at:
                self._spawn()
        return results

    def close(self) -> None:
        """Stop the process."""
        self._bury()

    def _receive(self) -> list[PackedAdapter | LoadFailed]:
        results: list[PackedAdapter | LoadFailed] = []
        try:
            while self._pipe is not None and self._pipe.poll(0):
                result: LoaderMessage = _decode(self._pipe.recv_bytes())
                self._heard_at = self._clock()
                if isinstance(result, LoadBeat):
                    continue
                results.append(self._map(result) if isinstance(result, LoadDone) else result)
                # only now: a process that dies between the facts and the descriptor still owes this result
                self._in_flight.discard(result.digest)
                self._num_deaths = 0
        except UNREADABLE as error:
            # what decoded files of tenants may say anything; what follows in the pipe cannot be told apart any more
            _log.error("the loader says what nobody can read (%s) and is ended", error)
            self._bury(_NONSENSE)
        except (EOFError, OSError, RuntimeError):
            self._bury()
        return results

    def _map(self, facts: LoadDone) -> PackedAdapter | LoadFailed:
        assert self._pipe is not None
        descriptor = recv_handle(self._pipe)
        try:
            return map_packed(facts, descriptor)
        except (OSError, ValueError) as error:
            message = f"Host memory failed: {error}"
            return LoadFailed(facts.digest, "pack", "adapter_loading", message, is_content=False)

    def _spawn(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            argv = [sys.executable, "-m", "loraplex_engine.lora.worker", str(theirs.fileno())]
            # one thread for products of matrices, as for all else that a load does beside the step loop
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            self._process = subprocess.Popen(  # noqa: S603
                argv, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=env
            )
        self._pipe = ours
        try:
            ours.send_bytes(msgspec.msgpack.encode(self._launch))
        except OSError:
            self._bury()

    def _bury(self, reason: str = _DIED) -> None:
        """Let go of a process that is dead or shall be; the next one starts after a pause that grows."""
        self._reason = reason
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._restart_at = self._clock() + min(_MAX_BACKOFF_S, 2.0**self._num_deaths - 1)
        self._num_deaths += 1


def _fail(digest: str, reason: str) -> LoadFailed:
    return LoadFailed(digest, "fetch", "adapter_loading", reason, is_content=False)
