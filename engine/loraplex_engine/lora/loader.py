"""The core's handle on the loader process. Starts it, sends jobs, collects results, restarts it when it dies."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq

from loraplex_engine.lora.packed import LoadFailed, LoadJob, LoadResult
from loraplex_engine.lora.worker import WorkerLaunch
from loraplex_registry.peft.spec import BaseSpec


class LoaderProcess:
    """`Loader` over a helper process and one zmq socket."""

    def __init__(
        self, *, cache_dir: str, base: BaseSpec, dtype: str, registry_url: str = "", engine_key: str = ""
    ) -> None:
        self._dir = tempfile.TemporaryDirectory(prefix="loraplex-loader-")
        endpoint = f"ipc://{Path(self._dir.name) / 'loader'}"
        self._launch = WorkerLaunch(endpoint, cache_dir, base, dtype, registry_url, engine_key)
        self._context = zmq.Context()
        self._in_flight: set[str] = set()
        # the side that connects keeps its queue while the process is away
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self.socket.connect(endpoint)
        self._process = self._spawn()

    def start(self, digest: str) -> None:
        """Begin to load; returns at once."""
        self._in_flight.add(digest)
        self.socket.send(msgspec.msgpack.encode(LoadJob(digest)))

    def take_finished(self) -> list[LoadResult]:
        """Results since the last call; when the process has died its jobs come back as failed."""
        results = self._receive()
        if self._process.poll() is not None:
            results += [_died(digest) for digest in sorted(self._in_flight)]
            self._in_flight.clear()
            self._process = self._spawn()
        return results

    def close(self) -> None:
        """Stop the process and remove its socket."""
        self._process.kill()
        self._process.wait()
        self.socket.close(linger=0)
        self._context.term()
        self._dir.cleanup()

    def _receive(self) -> list[LoadResult]:
        results: list[LoadResult] = []
        while self.socket.poll(0):
            result: LoadResult = msgspec.msgpack.decode(self.socket.recv(), type=LoadResult)
            self._in_flight.discard(result.digest)
            results.append(result)
        return results

    def _spawn(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "loraplex_engine.lora.worker"], stdin=subprocess.PIPE, close_fds=True
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._launch))
        process.stdin.close()
        return process


def _died(digest: str) -> LoadFailed:
    return LoadFailed(
        digest, "fetch", "adapter_loading", "The loader process died and was restarted.", is_content=False
    )
