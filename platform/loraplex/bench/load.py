"""Load: open, where requests arrive by a clock and never wait for answers, or closed, where so many are always open.

An open load counts every time from the planned moment, so a server (or client) that stalls is charged for all that had
to be sent meanwhile; what one measures from the moment of sending leaves that out.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from loraplex.bench.client import Client, Server
from loraplex.bench.outcome import Outcome
from loraplex.bench.pulse import Pulse
from loraplex.bench.workload import Request

T = TypeVar("T")
Advance = Callable[[], None]
"""Called once for each request that is over."""


@dataclass(frozen=True)
class Load:
    """How requests are sent: `rate` a second (open), `concurrency` at once (closed), or at a trace's own times."""

    rate: float | None = None
    concurrency: int | None = None
    timeout_s: float = 600.0

    @property
    def is_open(self) -> bool:
        """Whether a clock decides when requests are sent."""
        return self.concurrency is None


@dataclass
class Measured:
    """What came of a load; `planned_s` is the time over which it was to be sent, 0 for a closed one."""

    outcomes: list[Outcome]
    began_at: float
    seconds: float
    planned_s: float = 0.0
    pulse: Pulse = field(default_factory=Pulse)


def plan_arrivals(requests: Sequence[Request], rate: float, rng: random.Random) -> list[Request]:
    """Return the requests with moments of a Poisson process of `rate` a second.

    Semantics: of n arrivals in n / rate seconds each moment is uniform; drawn so, the rate is kept exactly.
    """
    span_s = len(requests) / rate
    moments = sorted(rng.uniform(0, span_s) for _ in requests)
    return [replace(request, at_s=at_s) for request, at_s in zip(requests, moments, strict=True)]


def run_in_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the fastest loop that is here, with as many open files as this process may have."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=_find_loop_factory()) as runner:
        return runner.run(main)


def _find_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


async def send_load(server: Server, path: str, requests: Sequence[Request], load: Load, advance: Advance) -> Measured:
    """Send all requests, wait for every answer, and return what the clients saw.

    Args:
        server: Where to.
        path: The route.
        requests: What, with their times if the load is open.
        load: How.
        advance: Told of each request that is over.
    """
    client = Client(server, path, load.timeout_s)
    measured = Measured([], time.perf_counter(), 0.0, requests[-1].at_s if load.is_open else 0.0)
    measured.pulse.start()
    try:
        if load.concurrency is None:
            await _send_open(client, requests, measured, advance)
        else:
            await _send_closed(client, requests, load.concurrency, measured, advance)
    finally:
        measured.pulse.stop()
        client.close()
    measured.seconds = max(outcome.end_at for outcome in measured.outcomes) - measured.began_at
    return measured


async def _send_open(client: Client, requests: Sequence[Request], measured: Measured, advance: Advance) -> None:
    async def send(request: Request, planned_at: float) -> None:
        measured.outcomes.append(await client.send(request, planned_at))
        advance()

    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            planned_at = measured.began_at + request.at_s
            if (wait_s := planned_at - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.create_task(send(request, planned_at))


async def _send_closed(
    client: Client, requests: Sequence[Request], concurrency: int, measured: Measured, advance: Advance
) -> None:
    async def work(queue: Iterator[Request]) -> None:
        for request in queue:
            measured.outcomes.append(await client.send(request, time.perf_counter()))
            advance()

    queue = iter(requests)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(work(queue))
