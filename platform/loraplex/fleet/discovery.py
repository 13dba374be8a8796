"""The addresses of engines: URLs as they are, and names that DNS turns into one URL per address, asked over and over.

Only `Discovery` writes what a name was last known to mean. One question per name at a time; a slow answer holds nobody
up who knows an older one. A name server that fails takes no engine away for a while: the engines still say themselves
whether they serve.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from loraplex_registry.wire.ending import end_tasks

DNS = "dns+"
FIRST_ANSWER_S = 2.0
KEPT_ABSENT_S = 10.0
"""How long addresses stay after the name server has said that there are none: it says so while all engines restart."""
KEPT_UNKNOWN_S = 600.0
"""How long they stay while the name server does not answer."""
Resolve = Callable[[str, int], Awaitable[list[str]]]


class _Known(msgspec.Struct, frozen=True):
    addresses: tuple[str, ...]
    found_at: float


class Discovery:
    """What the names among `engines` of all pools mean now."""

    def __init__(self, resolve: Resolve | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._resolve = resolve or resolve_name
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._questions: dict[str, asyncio.Task[None]] = {}

    async def find_urls(self, engines: Iterable[str]) -> list[str]:
        """Replace each `dns+http://name:port` by one URL per address of the name; each URL once.

        Waits only for names of which nothing is known, and not for long.
        """
        names = [engine for engine in engines if engine.startswith(DNS)]
        for name in names:
            if name not in self._questions:
                self._questions[name] = asyncio.create_task(self._ask(name))
        first = [self._questions[name] for name in names if name not in self._known and name in self._questions]
        if first:
            await asyncio.wait(first, timeout=FIRST_ANSWER_S)
        found = [url for engine in engines for url in self._urls(engine)]
        return list(dict.fromkeys(found))

    async def stop(self) -> None:
        """Ask no more."""
        await end_tasks(self._questions.values())

    def _urls(self, engine: str) -> Sequence[str]:
        if not engine.startswith(DNS):
            return (engine,)
        known = self._known.get(engine)
        return () if known is None else known.addresses

    async def _ask(self, engine: str) -> None:
        host, port, build_url = split_name(engine)
        try:
            addresses = await self._resolve(host, port)
        except socket.gaierror as error:
            is_absent = error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
            self._expire(engine, KEPT_ABSENT_S if is_absent else KEPT_UNKNOWN_S)
        except OSError:
            self._expire(engine, KEPT_UNKNOWN_S)
        else:
            urls = tuple(build_url(address) for address in sorted(set(addresses)) if is_engine_address(address))
            self._known[engine] = _Known(urls, self._clock())
        finally:
            self._questions.pop(engine, None)

    def _expire(self, engine: str, kept_s: float) -> None:
        known = self._known.get(engine)
        if known is not None and self._clock() - known.found_at > kept_s:
            del self._known[engine]


def split_name(engine: str) -> tuple[str, int, Callable[[str], str]]:
    """Return host and port of `dns+http://host:port`, and what makes a URL of an address; port 80 if none is given."""
    scheme, _, authority = engine.removeprefix(DNS).partition("://")
    host, _, port = authority.rpartition(":") if ":" in authority else (authority, "", "80")

    def build_url(address: str) -> str:
        return f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}"

    return host, int(port), build_url


def is_engine_address(address: str) -> bool:
    """Whether an engine may be there: no name server makes us call what answers on this link alone, or nobody."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if getattr(found, "scope_id", None) is not None:
        # of one link; and what stands there may be any text
        return False
    found = getattr(found, "ipv4_mapped", None) or found
    return not (found.is_link_local or found.is_multicast or found.is_unspecified)


async def resolve_name(host: str, port: int) -> list[str]:
    """Return the addresses of a name.

    Raises:
        OSError: There are none, or nobody says.
    """
    loop = asyncio.get_running_loop()
    infos: list[Any] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [info[4][0] for info in infos]
