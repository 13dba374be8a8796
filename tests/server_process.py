"""A server of the chaos suite as a process: started, killed, stopped for a while, ended, each time on the same port."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from platforms import command_of, list_children

_START_S = 180.0
_PAUSE_S = 0.05


class ServerProcess:
    """One server and all that it starts; it is alive when `path` is answered by anything but an error of its own."""

    def __init__(self, argv: list[str], environ: dict[str, str], log: Path, port: int, path: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._argv, self._environ, self._log, self._path = argv, environ, log, path
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process itself."""
        assert self._process is not None, "it runs"
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has said in all its lives."""
        return self._log.read_text(errors="replace")

    def launch(self) -> None:
        """Start it; it serves a while later."""
        options: dict[str, Any] = {"env": self._environ, "stdin": subprocess.DEVNULL, "start_new_session": True}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log, **options)

    def wait_alive(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert self._process is not None
            assert self._process.poll() is None, self.log[-3000:]
            assert time.monotonic() < deadline, self.log[-3000:]
            time.sleep(_PAUSE_S)

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.launch()
        self.wait_alive()

    def kill(self) -> None:
        """`kill -9` of it alone, or of nothing; what it has started must end by itself."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def end(self, limit_s: float) -> int:
        """SIGTERM; returns the exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(limit_s)
        self._process = None
        return code

    def find(self, word: str) -> list[int]:
        """The processes below it whose command has `word`; of a process that forks, its forks too."""
        found = []
        for pid in list_children(self.pid):
            with contextlib.suppress(OSError):
                found += [pid] if word in command_of(pid) else []
        return found

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}{self._path}", trust_env=False, timeout=5).status_code < 500
        except httpx.TransportError:
            return False


def wait_gone(pids: list[int], limit_s: float = 30.0) -> None:
    """Wait until none of them runs."""
    deadline = time.monotonic() + limit_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(_PAUSE_S)


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def send_signal(number: signal.Signals, pids: list[int]) -> None:
    """Signal each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
