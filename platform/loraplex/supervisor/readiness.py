"""Waiting until a child serves: its address is asked until it says so, its process ends, or time is up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import httpx

from loraplex.client.connection import Connection
from loraplex.client.location import Location
from loraplex.client.management import Management
from loraplex.supervisor.child import Child
from loraplex.supervisor.display import Stage
from loraplex.supervisor.errors import PartFailedError

_POLL_S = 0.1


async def wait_until_ready(
    child: Child, url: str, build_headers: Callable[[], Mapping[str, str]], stage: Stage, limit_s: float
) -> None:
    """Return when `url` answers 200; meanwhile show the last line of the child's log.

    Args:
        child: The process that should come to serve it.
        url: Its readiness address.
        build_headers: Headers of each try; a token in them may be short-lived.
        stage: Shows the child's last line.
        limit_s: Longest wait, seconds.

    Raises:
        PartFailedError: The child ended or took too long; the end of its log is in the message.
    """
    deadline = time.monotonic() + limit_s
    async with httpx.AsyncClient(timeout=2.0, trust_env=False) as http:
        while not await _is_ready(http, url, build_headers()):
            if child.exit_code is not None:
                raise PartFailedError(_explain(child, f"stopped while it started (exit code {child.exit_code})"))
            if time.monotonic() > deadline:
                raise PartFailedError(_explain(child, f"was not ready after {limit_s:.0f} seconds"))
            stage.detail(child.read_tail(1))
            await asyncio.sleep(_POLL_S)


async def wait_until_served(location: Location, stage: Stage, limit_s: float) -> None:
    """Return when the gateway sends traffic to every engine that it knows.

    Raises:
        PartFailedError: It does not after `limit_s` seconds; its reason is in the message.
    """
    deadline = time.monotonic() + limit_s
    while problems := await asyncio.to_thread(_list_problems, location):
        if time.monotonic() > deadline:
            raise PartFailedError(f"The gateway sends no traffic to the engine: {'; '.join(problems)}.")
        stage.detail(problems[0])
        await asyncio.sleep(_POLL_S)


def _list_problems(location: Location) -> list[str]:
    with Connection(location) as connection:
        fleet = Management(connection).list_fleet()
    if not fleet:
        return ["it knows no engine yet"]
    return [f"{replica.url}: {replica.problem or 'not yet asked'}" for replica in fleet if not replica.serves]


async def _is_ready(http: httpx.AsyncClient, url: str, headers: Mapping[str, str]) -> bool:
    try:
        response = await http.get(url, headers=dict(headers))
    except httpx.TransportError:
        return False
    return response.status_code == httpx.codes.OK


def _explain(child: Child, what: str) -> str:
    tail = child.read_tail()
    return f"The {child.spec.name} {what}. Its log ({child.spec.log}) ends:\n\n{tail or '(nothing)'}"
