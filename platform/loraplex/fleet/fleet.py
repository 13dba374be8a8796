"""The engines of all pools: what they hold, which one a request goes to, and calls to them in the platform's name.

`Fleet` composes the parts: `Discovery` finds engines, `Lookout` asks each for its state once a second, `Health` knows
how this gateway's requests went there, `Traffic` what was asked for lately, `place` chooses, `Warmer` loads ahead. Only
`Fleet` writes the view and the counts of what is under way.

Whoever acts on the view does it in `on_view`, before the next look: so what engines were told to forget in between is
in no view that is still acted on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from loraplex.fleet.discovery import Discovery
from loraplex.fleet.health import Health
from loraplex.fleet.lookout import ANSWER_S, PATIENCE_S, Lookout
from loraplex.fleet.placement import Outlook, Placement, Wish, count_homes, find_able, place
from loraplex.fleet.pools import Pool, parse_pools
from loraplex.fleet.traffic import Traffic
from loraplex.fleet.view import FleetView, Replica, choose_full, read_full_replica, read_replica
from loraplex.fleet.warming import Load, Warmer, plan_loads
from loraplex_engine.wire.client import EngineClient, ReplicaFailedError, UnreachableError
from loraplex_registry.peft.unreadable import UNREADABLE
from loraplex_registry.wire.ending import end_tasks

POLL_EVERY_S = 1.0
_FORGET_TIMEOUT_S = 5.0
_INTENT_S = 2.0
_ARRIVAL_S = 3.0
# times what a plan took
_PLAN_GAP, _LONGEST_PLAN_GAP_S = 100.0, 30.0
_OK = 200
_MAX_MESSAGE_LEN = 300
_log = logging.getLogger(__name__)


class Fleet:
    """Replicas and their clients.

    Args:
        pools: What the operator configured.
        sign: Makes a token for calls in the platform's own name.
        find_fingerprint: The registered fingerprint of a base, None if it is not registered.
        is_served: Whether some name of a base may be called that means a digest; others are not loaded ahead.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        sign: Callable[[], str],
        find_fingerprint: Callable[[str], str | None],
        is_served: Callable[[str, str], bool] = lambda base, digest: True,  # noqa: ARG005 - for tests without names
    ) -> None:
        self.pools = pools
        self._sign = sign
        self._find_fingerprint = find_fingerprint
        self._is_served = is_served
        self._clients: dict[str, EngineClient] = {}
        self._in_flight: Counter[str] = Counter()
        self._intents: defaultdict[str, deque[float]] = defaultdict(deque)
        self._arriving: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._task: asyncio.Task[None] | None = None
        self._look_lock = asyncio.Lock()
        self._plan_at = 0.0
        self._lost: set[str] = set()
        self._discovery = Discovery()
        self._lookout = Lookout(lambda url: self.client(url).state(), self._judge)
        self._warmer = Warmer(self._warm_at)
        self.place: Callable[[Wish, FleetView, Outlook, Sequence[str]], Placement | None] = place
        """What chooses; benchmarks put another in its place."""
        self.health = Health()
        self.traffic = Traffic()
        self.view = FleetView()
        self.on_placed: Callable[[str], None] = _ignore_reason
        """Told why each replica was chosen; one of `placement.REASONS`."""
        self.on_view: Callable[[FleetView], Awaitable[None]] = _ignore_view
        self.find_registered: Callable[[str], frozenset[str]] = _know_none_registered
        """The digests of the full versions that are registered to a pool."""

    async def start(self) -> None:
        """Ask all engines once, then go on once a second."""
        await self.poll()
        self._task = asyncio.create_task(self._keep_polling())

    async def stop(self) -> None:
        """Stop asking and close all connections."""
        if self._task is not None:
            await end_tasks([self._task])
        await self._warmer.stop()
        await self._lookout.stop()
        await self._discovery.stop()
        for client in self._clients.values():
            await client.close()

    def take_pools(self, text: str) -> None:
        """Have these pools from now on, as LORAPLEX_POOLS has them; running requests end where they are.

        Raises:
            SettingsError: The text is not valid; then nothing changes.
        """
        self.pools = parse_pools(text)

    def client(self, url: str) -> EngineClient:
        """Return the client of the engine at `url`."""
        if url not in self._clients:
            self._clients[url] = EngineClient(url, self._sign)
        return self._clients[url]

    def choose(
        self,
        base: str,
        digest: str | None,
        rank: int,
        exclude: Sequence[str] = (),
        *,
        prefix: str = "",
        weights: str | None = None,
    ) -> Replica | None:
        """Return the replica for a request, None if none serves; a request is expected there from now on.

        Args:
            base: Served name of the base.
            digest: The adapter version, None for the base itself.
            rank: The adapter's.
            exclude: URLs that have failed this request already.
            prefix: What requests share that begin alike; empty: nothing is known.
            weights: Digest of the base's weights that alone may serve the version; None: any may.
        """
        if not exclude:
            self.traffic.note(base, digest, rank, weights=weights)
        able = find_able(base, rank, self.view, weights=weights)
        wish = Wish(
            base=base,
            digest=digest,
            rank=rank,
            weights=weights,
            prefix=prefix,
            num_homes=count_homes(self.traffic.share(base, digest), len(able)),
            draw=random.getrandbits(32),
        )
        placement = self.place(wish, self.view, self._build_outlook(), exclude)
        if placement is None:
            return None
        self.on_placed(placement.reason)
        self._expect(placement.replica.url, digest)
        return placement.replica

    def serves(self, base: str, exclude: Sequence[str] = (), *, weights: str | None = None) -> bool:
        """Whether a replica serves the base itself, with those weights if there are any."""
        return bool(find_able(base, 0, self.view, exclude=exclude, weights=weights))

    def choose_full(self, pool: str, digest: str, exclude: Sequence[str] = ()) -> Replica | None:
        """Return the replica for a request to the full model `digest` of a pool, None if none serves it."""
        return choose_full(self.view, pool, digest, self._in_flight, exclude)

    def num_in_flight(self, url: str) -> int:
        """Return how many requests of this gateway are at `url` now."""
        return self._in_flight[url]

    @contextmanager
    def count(self, url: str) -> Iterator[None]:
        """Count a request as in flight at `url` until the block ends."""
        if self._intents[url]:
            self._intents[url].popleft()
        self._in_flight[url] += 1
        self.health.begin(url)
        try:
            yield
        finally:
            self._in_flight[url] -= 1

    async def poll(self) -> None:
        """Ask every engine for its state, replace the view and let `on_view` act on it."""
        async with self._look_lock:
            await self._look()
            await self.on_view(self.view)
        self._load_ahead()

    def _load_ahead(self) -> None:
        """Begin what is planned, rarely enough that planning for a large fleet delays no request by much."""
        now = time.monotonic()
        if now >= self._plan_at:
            self._warmer.begin(self.plan_loads())
            self._plan_at = now + min(_LONGEST_PLAN_GAP_S, _PLAN_GAP * (time.monotonic() - now))

    def _expect(self, url: str, digest: str | None) -> None:
        """Count a request that is on its way: many may be chosen for before the first of them gets there."""
        now = time.monotonic()
        self._intents[url].append(now)
        if digest is not None:
            self._arriving[url][digest] = now
        self.health.begin(url, _INTENT_S)

    def _build_outlook(self) -> Outlook:
        now = time.monotonic()
        in_flight = dict(self._in_flight)
        for url, intents in self._intents.items():
            while intents and now - intents[0] > _INTENT_S:
                intents.popleft()
            in_flight[url] = in_flight.get(url, 0) + len(intents)
        return Outlook(in_flight=in_flight, arriving=self._arriving, ejected=self.health.find_ejected())

    def plan_loads(self) -> list[Load]:
        """Return the loads that replicas lack: copies of what is hot, and what is asked for and nobody holds."""
        outlook = self._build_outlook()
        loads: list[Load] = []
        for base in sorted({replica.base for replica in self.view.replicas if replica.model is None}):
            demands = self.traffic.demands(base)
            shares = {one.digest: self.traffic.share(base, one.digest) for one in demands}
            loads += plan_loads(base, self.view, demands, shares, outlook, partial(self._is_served, base))
        return loads

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
            self._lookout.look_away()
            await self._look(ANSWER_S)

    async def warm(self, base: str, digest: str, rank: int, weights: str | None = None) -> dict[str, str | None]:
        """Make every serving engine of a base load `digest` and return by their names what kept each from it, or None.

        Those that take no adapters of that rank and weights are left out. Waits for the loads, as long as engines let
        them take.
        """
        able = [
            replica
            for replica in self.view.replicas
            if replica.base == base and replica.problem is None and replica.takes(rank, weights)
        ]
        problems = await asyncio.gather(*(self._warm_at(replica.url, digest) for replica in able))
        return {replica.name: problem for replica, problem in zip(able, problems, strict=True)}

    async def _warm_at(self, url: str, digest: str) -> str | None:
        try:
            answer = await self.client(url).load_adapter(digest)
        except (UnreachableError, ReplicaFailedError):
            return "it does not answer"
        return None if answer.status_code == _OK else _read_message(answer.content)

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

    async def _look(self, patience_s: float = PATIENCE_S) -> None:
        places = [(pool, url) for pool in self.pools for url in await self._discovery.find_urls(pool.engines)]
        replicas = await self._lookout.look(places, patience_s)
        before = {replica.url: replica.problem for replica in self.view.replicas}
        self.view = FleetView(tuple(replicas))
        self._give_up_on(replicas)
        for replica in replicas:
            if before.get(replica.url, "") != replica.problem:
                _log.info("engine %s: %s", replica.url, replica.problem or "serves")
        self._forget_arrivals()
        await self._forget_others({url for _, url in places})

    def _give_up_on(self, replicas: Sequence[Replica]) -> None:
        """Let requests go elsewhere that wait for the first word of an engine which does not even say its state."""
        lost = {replica.url for replica in replicas if not replica.state}
        for url in lost & self._lost:
            if url in self._clients:
                self._clients[url].give_up_waiting()
        self._lost = lost

    def _judge(self, pool: Pool, url: str, state: dict[str, Any]) -> Replica:
        if pool.model is not None:
            replica = read_full_replica(url, pool.name, pool.model, state, self.find_registered(pool.name))
        else:
            replica = read_replica(url, pool.name, pool.base, state, self._find_fingerprint(pool.base))
        return msgspec.structs.replace(replica, num_own=self._in_flight[url])

    def _forget_arrivals(self) -> None:
        """Forget what was sent so long ago that replicas themselves say whether they have it."""
        oldest = time.monotonic() - _ARRIVAL_S
        for url, digests in self._arriving.items():
            self._arriving[url] = {digest: sent_at for digest, sent_at in digests.items() if sent_at > oldest}

    async def _forget_others(self, urls: set[str]) -> None:
        """Close the clients of addresses that a name no longer has, once no request is there any more."""
        gone = [url for url in self._clients if url not in urls and not self._in_flight[url]]
        clients = [self._clients.pop(url) for url in gone]
        for url in gone:
            self._lookout.forget(url)
            del self._in_flight[url]
            self._intents.pop(url, None)
            self._arriving.pop(url, None)
        self.health.keep_only(self._clients)
        for client in clients:
            await client.close()

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            try:
                await self.poll()
            except Exception:  # noqa: BLE001 - one bad answer must not end the asking
                _log.exception("the fleet could not be polled")


def _read_message(body: bytes) -> str:
    """The sentence of an engine's error; what it quotes may come from a tenant's file."""
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (*UNREADABLE, TypeError, KeyError):
        return "it could not load the adapter"
    return "".join(char if char.isprintable() else " " for char in message)[:_MAX_MESSAGE_LEN]


def _ignore_reason(reason: str) -> None:
    """Nobody counts."""


async def _ignore_view(view: FleetView) -> None:
    """Nobody acts on what is seen."""


def _know_none_registered(pool: str) -> frozenset[str]:  # noqa: ARG001 - whoever knows takes its place
    """No full version is registered."""
    return frozenset()
