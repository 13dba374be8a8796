"""A Redis server of a test alone, which can be killed, stopped for a while and started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support import free_port


class RedisUnavailable(Exception):
    """No server can be started; the message says why."""


class RedisServer:
    """One server on a port of its own; it keeps nothing on disk."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary = binary
        self._folder = folder
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/3"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, empty."""
        argv = [self._binary, "--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([*argv, "--save", ""], stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while b"Ready to accept" not in (self._folder / "log").read_bytes():
            assert time.monotonic() < deadline, "Redis did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        """`kill -9`; fine if it does not run."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
            (self._folder / "log").write_bytes(b"")

    def freeze(self) -> None:
        """Let it hang: it takes connections and answers nothing."""
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self._pid, signal.SIGCONT)

    @property
    def _pid(self) -> int:
        assert self._process is not None
        return self._process.pid


@contextmanager
def running_redis() -> Iterator[RedisServer]:
    """Yield a server that runs.

    Raises:
        RedisUnavailable: There is none to start.
    """
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise RedisUnavailable("there is no redis-server to start")
    with tempfile.TemporaryDirectory(prefix="lpx-redis-") as folder:
        server = RedisServer(binary, Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.kill()
