"""The engines of all pools: one client each, asked for their state once a second. Only `Fleet` writes the view.

Whoever acts on the view does it in `on_view`, before the next look: so what engines were told to forget in between is
in no view that is still acted on.

A replica that refuses a connection is out at once; one that is only slow gets three tries.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from loraplex.fleet.pools import Pool
from loraplex.fleet.view import FleetView, Replica, choose_replica, read_replica
from loraplex_engine.wire.client import EngineClient, ReplicaFailedError, UnreachableError

POLL_EVERY_S = 1.0
_MAX_SLOW_POLLS = 3
_POLL_TIMEOUT_S = 5.0
_RESOLVE_TIMEOUT_S = 2.0
_FORGET_TIMEOUT_S = 5.0
_DNS = "dns+"
_log = logging.getLogger(__name__)


class Fleet:
    """Replicas and their clients.

    Args:
        pools: What the operator configured.
        sign: Makes a token for calls in the platform's own name.
        find_fingerprint: The registered fingerprint of a base, None if it is not registered.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        sign: Callable[[], str],
        find_fingerprint: Callable[[str], str | None],
    ) -> None:
        self._pools = pools
        self._sign = sign
        self._find_fingerprint = find_fingerprint
        self._clients: dict[str, EngineClient] = {}
        self._slow_polls: Counter[str] = Counter()
        self._in_flight: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._look_lock = asyncio.Lock()
        self.view = FleetView()
        self.on_view: Callable[[FleetView], Awaitable[None]] = _ignore_view

    async def start(self) -> None:
        """Ask all engines once, then go on once a second."""
        await self.poll()
        self._task = asyncio.create_task(self._keep_polling())

    async def stop(self) -> None:
        """Stop asking and close all connections."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for client in self._clients.values():
            await client.close()

    def client(self, url: str) -> EngineClient:
        """Return the client of the engine at `url`."""
        if url not in self._clients:
            self._clients[url] = EngineClient(url, self._sign)
        return self._clients[url]

    def choose(self, base: str, digest: str | None, rank: int, exclude: Sequence[str] = ()) -> Replica | None:
        """Return the replica for a request, None if none serves."""
        return choose_replica(self.view, base, digest, self._in_flight, exclude, rank=rank)

    def serves(self, base: str, exclude: Sequence[str] = ()) -> bool:
        """Whether a replica serves the base itself."""
        return choose_replica(self.view, base, None, self._in_flight, exclude) is not None

    def num_in_flight(self, url: str) -> int:
        """Return how many requests of this gateway are at `url` now."""
        return self._in_flight[url]

    @contextmanager
    def count(self, url: str) -> Iterator[None]:
        """Count a request as in flight at `url` until the block ends."""
        self._in_flight[url] += 1
        try:
            yield
        finally:
            self._in_flight[url] -= 1

    async def poll(self) -> None:
        """Ask every engine for its state, replace the view and let `on_view` act on it."""
        async with self._look_lock:
            await self._look()
            await self.on_view(self.view)

    async def forget_failure(self, digest: str) -> None:
        """Make the engines that cannot load `digest`, or have quarantined it, forget so; they load it anew at once.

        Waits a few seconds for the loads; one that fails again is a first failure.
        An engine that cannot be reached keeps its opinion, and may show it again.
        """
        async with self._look_lock:
            await self._look()
            urls = [
                replica.url
                for replica in self.view.replicas
                if digest in replica.failed or digest in replica.quarantined
            ]
            await asyncio.gather(*(self._load_anew(url, digest) for url in urls))
            await self._look()

    async def drop(self, base: str, digest: str) -> None:
        """Make the engines of a base give back what they hold of `digest`; requests that run on it end first.

        Waits a few seconds for them. An engine does so by the call alone; one that cannot be reached keeps its copy
        until other adapters push it out.
        """
        urls = [replica.url for replica in self.view.replicas if replica.base == base and replica.problem is None]
        await asyncio.gather(*(self._drop_at(url, digest) for url in urls))

    async def _drop_at(self, url: str, digest: str) -> None:
        try:
            async with asyncio.timeout(_FORGET_TIMEOUT_S):
                await self.client(url).drop_adapter(digest)
        except (UnreachableError, ReplicaFailedError, TimeoutError) as error:
            _log.info("engine %s did not confirm that it dropped %s: %r", url, digest, error)

    async def _load_anew(self, url: str, digest: str) -> None:
        try:
            async with asyncio.timeout(_FORGET_TIMEOUT_S):
                await self.client(url).load_adapter(digest)
        except (UnreachableError, ReplicaFailedError, TimeoutError) as error:
            # what it held against the digest is gone by the call alone
            _log.info("engine %s did not confirm a load of %s: %r", url, digest, error)

    async def _look(self) -> None:
        places = [(pool, url) for pool in self._pools for url in await _resolve(pool.engines)]
        replicas = await asyncio.gather(*(self._poll_one(pool, url) for pool, url in places))
        before = {replica.url: replica.problem for replica in self.view.replicas}
        self.view = FleetView(tuple(replicas))
        for replica in replicas:
            if before.get(replica.url, "") != replica.problem:
                _log.info("engine %s: %s", replica.url, replica.problem or "serves")
        await self._forget_others({url for _, url in places})

    async def _forget_others(self, urls: set[str]) -> None:
        """Close the clients of addresses that a name no longer has, once no request is there any more."""
        gone = [url for url in self._clients if url not in urls and not self._in_flight[url]]
        clients = [self._clients.pop(url) for url in gone]
        for url in gone:
            del self._in_flight[url], self._slow_polls[url]
        for client in clients:
            await client.close()

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            try:
                await self.poll()
            except Exception:  # noqa: BLE001 - one bad answer must not end the asking
                _log.exception("the fleet could not be polled")

    async def _poll_one(self, pool: Pool, url: str) -> Replica:
        try:
            async with asyncio.timeout(_POLL_TIMEOUT_S):
                state = await self.client(url).state()
        except UnreachableError:
            return _down(pool, url, "it cannot be reached")
        except (ReplicaFailedError, TimeoutError, msgspec.DecodeError):
            return self._slow(pool, url)
        self._slow_polls[url] = 0
        return read_replica(url, pool.name, pool.base, state, self._find_fingerprint(pool.base))

    def _slow(self, pool: Pool, url: str) -> Replica:
        """Keep what was known of an engine that was slow once or twice."""
        self._slow_polls[url] += 1
        known = next((replica for replica in self.view.replicas if replica.url == url), None)
        if known is not None and self._slow_polls[url] < _MAX_SLOW_POLLS:
            return known
        return _down(pool, url, "it does not say its state")


async def _ignore_view(view: FleetView) -> None:
    """Nobody acts on what is seen."""


def _down(pool: Pool, url: str, problem: str) -> Replica:
    return Replica(url=url, pool=pool.name, base=pool.base, problem=problem)


async def _resolve(engines: Sequence[str]) -> list[str]:
    """Replace each `dns+http://name:port` by one URL per address that the name has now."""
    found: list[str] = []
    for engine in engines:
        found += await _addresses(engine) if engine.startswith(_DNS) else [engine]
    return found


async def _addresses(engine: str) -> list[str]:
    scheme, _, authority = engine.removeprefix(_DNS).partition("://")
    host, _, port = authority.rpartition(":") if ":" in authority else (authority, "", "80")
    try:
        async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
            infos: list[Any] = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return []
    addresses = sorted({info[4][0] for info in infos})
    return [f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}" for address in addresses]
