"""A child of `loraplex up` that serves and then hangs is ended and started again; a slow start is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.supervisor.child import Child, ChildSpec
from loraplex.supervisor.watch import Watch
from support import free_port

LOOK_S = 0.05
SILENCE_S = 0.5
PROGRAM = """
import http.server, sys, time
time.sleep(float(sys.argv[2]))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


class Watched:
    """A child that serves after a while, and its watch."""

    def __init__(self, folder: Path, start_s: float) -> None:
        port = free_port()
        argv = (sys.executable, "-c", PROGRAM, str(port), str(start_s))
        self.ends: list[int] = []
        self.stuck: list[str] = []
        self.child = Child(
            ChildSpec("engine", argv, dict(os.environ), folder / "log"), lambda _, code, __: self.ends.append(code)
        )
        self.watch = Watch(
            self.child,
            f"http://127.0.0.1:{port}/",
            lambda name, _: self.stuck.append(name),
            look_s=LOOK_S,
            silence_s=SILENCE_S,
        )

    async def until(self, what: str) -> None:
        """Wait for a word in the child's log: it has answered a look."""
        async with asyncio.timeout(20):
            while what not in self.child.spec.log.read_text():  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(LOOK_S)


@pytest.fixture
async def watched(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Watched]:
    found = Watched(tmp_path, getattr(request, "param", 0.0))
    await found.child.start()
    found.child.keep()
    task = asyncio.create_task(found.watch.run())
    yield found
    task.cancel()
    await asyncio.wait([task])
    await found.child.stop(5)


async def test_child_that_hangs_is_ended_and_started_again(watched: Watched) -> None:
    await watched.until("GET")
    first = watched.child.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    async with asyncio.timeout(20):
        while watched.child.pid in (first, None):  # noqa: ASYNC110 - a process id is no event
            await asyncio.sleep(LOOK_S)
    assert (watched.stuck, watched.ends) == (["engine"], [-signal.SIGKILL])


@pytest.mark.parametrize("watched", [2 * SILENCE_S], indirect=True)
async def test_child_that_still_starts_may_take_its_time(watched: Watched) -> None:
    await watched.until("GET")
    assert (watched.stuck, watched.ends) == ([], [])
