"""Makes the fleet what is wanted of it: compares once a second, repairs what it can, and tells of each repair.

`Reconciler` is the only one that acts on differences. Among several gateways one acts, all of them look. Repairs run
beside each other, one for each difference; one that fails or does not help is tried again after a pause that doubles.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from loraplex.errors import LoraplexError
from loraplex.fleet.desired import BrokenAlias, Desired, Naming
from loraplex.fleet.difference import Difference, Repair, find_differences
from loraplex.fleet.fleet import Fleet
from loraplex_engine.wire.client import EngineClient, ReplicaFailedError, UnreachableError
from loraplex_registry.peft.unreadable import UNREADABLE
from loraplex_registry.wire.ending import end_tasks

LOOK_EVERY_S = 1.0
_PAUSE_S = 2.0
_MAX_PAUSE_S = 60.0
_NAMELESS_S = 2.0
"""How long content stays that was never named here, or no longer is: an upload may be about to name it."""
_START_S = 30.0
"""How long replicas that have not served yet may take to start before that is told."""
_MAX_REPAIRS = 4
"""At a time on one replica, so that one that is slow delays no other."""
_MAX_RECENT = 50
_MAX_EVENTS = 1000
_MAX_DIGESTS = 10_000
_OK = (200, 204)
_log = logging.getLogger(__name__)


class CountRepair(Protocol):
    """Counts one repair by the kind of its difference, and whether it could be made."""

    def __call__(self, kind: str, *, is_made: bool) -> None:
        """Count it."""


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was done, or happened, to a part of the fleet; `action` begins with `fleet.`."""

    action: str
    subject: str
    tenant_id: str | None = None
    tenant: str | None = None
    details: dict[str, Any]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A repair that was made, and how long the difference had been there, seconds."""

    at: datetime
    kind: str
    subject: str
    digest: str | None
    action: str
    took_s: float


class Open(msgspec.Struct, kw_only=True):
    """A difference as long as it is there; `problem` says why the last repair failed."""

    difference: Difference
    since: datetime
    begun_at: float
    num_attempts: int = 0
    next_at: float = 0.0
    problem: str | None = None
    is_told: bool = False


class Reconciler:
    """Desired against actual.

    Args:
        fleet: The replicas.
        read_desired: What is wanted now. Raises LoraplexError if it cannot be read.
        mend_alias: Lets an alias lead to what is there, and says where it leads. Raises LoraplexError.
        record: Writes an event. Raises LoraplexError.
        may_act: Whether this gateway is the one that repairs. Raises LoraplexError.
        warm_s: How long engines keep content that only may be restored, seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        read_desired: Callable[[], Awaitable[Desired]],
        mend_alias: Callable[[BrokenAlias], Awaitable[str]],
        record: Callable[[FleetEvent], Awaitable[None]],
        may_act: Callable[[], Awaitable[bool]],
        warm_s: float,
    ) -> None:
        self._fleet = fleet
        self._read_desired = read_desired
        self._mend_alias = mend_alias
        self._record = record
        self._may_act = may_act
        self._warm_s = warm_s
        self._open: dict[tuple[str, str, str], Open] = {}
        self._tasks: dict[tuple[str, str, str], asyncio.Task[None]] = {}
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._served: set[str] = set()
        self._unnamed_since: dict[tuple[str, str], float] = {}
        self._events: deque[FleetEvent] = deque(maxlen=_MAX_EVENTS)
        self.on_repair: CountRepair = _count_nothing
        """Told of each repair."""
        self.on_look: Callable[[Mapping[str, int]], None] = lambda _: None
        """Told at each look how many differences of each kind there are."""
        self.recent: deque[Done] = deque(maxlen=_MAX_RECENT)
        self.desired = Desired()

    @property
    def open(self) -> list[Open]:
        """The differences of the last look, the oldest first."""
        return sorted(self._open.values(), key=lambda one: (one.begun_at, one.difference.key))

    async def run(self) -> None:
        """Look once a second until cancelled; repairs that are under way end with it."""
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                try:
                    await self.look()
                except LoraplexError as error:
                    _log.warning("the fleet cannot be compared with what is wanted: %s", error.message)
                except Exception:  # noqa: BLE001 - it must outlive what one engine says
                    _log.exception("the fleet cannot be compared with what is wanted")
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End what is under way; fine if nothing is."""
        await end_tasks(self._tasks.values())

    async def look(self) -> None:
        """Compare once, and begin every repair whose time has come.

        Raises:
            LoraplexError: What is wanted cannot be read, or who acts; nothing was done.
        """
        self.desired = desired = await self._read_desired()
        view = self._fleet.view
        self._note_naming(desired)
        self._take(find_differences(desired, view, self._is_due))
        self.on_look(Counter(found.difference.kind for found in self._open.values()))
        acts = await self._may_act()
        if acts:
            self._tell_of_replicas()
        self._served |= {replica.url for replica in view.replicas if replica.problem is None}
        if not acts:
            return
        for key, found in self._open.items():
            if found.difference.repair is not None and key not in self._tasks and time.monotonic() >= found.next_at:
                task = self._tasks[key] = asyncio.create_task(self._try_repair(found, found.difference.repair))
                task.add_done_callback(lambda _, key=key: self._tasks.pop(key, None))  # type: ignore[misc]
        await self._write_events()

    def _take(self, differences: list[Difference]) -> None:
        """Keep what is known of differences that are still there."""
        now = time.monotonic()
        at = datetime.now(UTC)
        before, self._open = self._open, {}
        for difference in differences:
            found = before.pop(difference.key, None) or Open(difference=difference, since=at, begun_at=now)
            found.difference = difference
            self._open[difference.key] = found
        for gone in before.values():
            self._tell_end(gone, now)
        subjects = {found.difference.subject for found in self._open.values()}
        self._turns = {subject: turns for subject, turns in self._turns.items() if subject in subjects}

    def _note_naming(self, desired: Desired) -> None:
        """Note since when content that engines hold has not been callable."""
        now = time.monotonic()
        held = {
            (replica.base, digest)
            for replica in self._fleet.view.replicas
            if replica.model is None
            for digest in replica.resident | replica.in_memory
        }
        unnamed = [pair for pair in held if desired.find_naming(*pair) is not Naming.CALLABLE]
        self._unnamed_since = {pair: self._unnamed_since.get(pair, now) for pair in unnamed[:_MAX_DIGESTS]}

    def _is_due(self, base: str, digest: str) -> bool:
        since = self._unnamed_since.get((base, digest))
        if since is None:
            return False
        is_retired = self.desired.find_naming(base, digest) is Naming.RETIRED
        return time.monotonic() - since >= (self._warm_s if is_retired else min(_NAMELESS_S, self._warm_s))

    def _tell_of_replicas(self) -> None:
        """Tell once of each difference that only an operator can end."""
        now = time.monotonic()
        for found in self._open.values():
            difference = found.difference
            if found.is_told or difference.repair is not None:
                continue
            is_start = difference.url not in self._served and difference.kind != "replica_refused"
            if is_start and now - found.begun_at < _START_S:
                continue
            found.is_told = True
            self._events.append(_build_event(difference, _KIND_TO_ACTION[difference.kind], found, now))

    def _tell_end(self, found: Open, now: float) -> None:
        """A replica that was told to be gone serves again, or is no longer one of the pool's."""
        if not found.is_told or found.difference.kind not in ("replica_down", "replica_refused"):
            return
        urls = {replica.url: replica.problem for replica in self._fleet.view.replicas}
        url = found.difference.url
        action = "replica_back" if url in urls else "replica_removed"
        if urls.get(url) is None:
            self._events.append(_build_event(found.difference, action, found, now))

    async def _try_repair(self, found: Open, repair: Repair) -> None:
        difference = found.difference
        found.num_attempts += 1
        async with self._turns.setdefault(difference.subject, asyncio.Semaphore(_MAX_REPAIRS)):
            problem, more = await self._repair(difference, repair)
        now = time.monotonic()
        # also after a repair that was made: the replica says so at its next look only
        found.next_at = now + min(_MAX_PAUSE_S, _PAUSE_S * 2 ** min(found.num_attempts - 1, 10))
        self.on_repair(difference.kind, is_made=problem is None)
        if problem is None:
            found.problem = None
            event = _build_event(difference, repair.value, found, now, **more)
            self.recent.append(_build_done(difference, repair.value, found, now))
            self._events.append(event)
            _log.info("%s: %s (%s, %s)", difference.subject, repair.value, difference.desired, difference.actual)
            return
        if found.problem is None:
            self._events.append(_build_event(difference, "repair_failed", found, now, problem=problem))
        found.problem = problem
        _log.warning("%s: %s is not repaired: %s", difference.subject, difference.kind, problem)

    async def _repair(self, difference: Difference, repair: Repair) -> tuple[str | None, dict[str, Any]]:
        """Make a repair and return why it could not be made, or None, and what else there is to tell of it."""
        try:
            if repair is Repair.MEND_ALIAS:
                assert difference.alias is not None, "it is about one"
                return None, {"now": await self._mend_alias(difference.alias)}
            assert difference.digest is not None, "it is about one"
            answer = await _call(self._fleet.client(difference.url), repair, difference.digest)
        except LoraplexError as error:
            return error.message, {}
        except (UnreachableError, ReplicaFailedError):
            return "the replica does not answer", {}
        except Exception:  # noqa: BLE001 - tried again, whatever it was
            _log.exception("%s: %s cannot be repaired", difference.subject, difference.kind)
            return "it failed inside the gateway", {}
        return answer, {}

    async def _write_events(self) -> None:
        """Write what there is to tell; what cannot be written now is kept for the next look."""
        while self._events:
            event = self._events.popleft()
            try:
                await self._record(event)
            except BaseException:
                self._events.appendleft(event)
                raise


_KIND_TO_ACTION = {
    "replica_down": "replica_lost",
    "replica_refused": "replica_refused",
    "pin_unknown": "pin_ignored",
    "pin_unplaced": "pin_ignored",
}


_REPAIR_TO_PIN = {Repair.LOAD: True, Repair.PIN: True, Repair.UNPIN: False, Repair.LOAD_AGAIN: None}


async def _call(client: EngineClient, repair: Repair, digest: str) -> str | None:
    """Ask an engine for a repair and return why it refused, None if it did not."""
    if repair is Repair.DROP:
        answer = await client.drop_adapter(digest)
    else:
        # a pin that cannot be loaded must come to the end of its tries, as for requests
        answer = await client.load_adapter(digest, pin=_REPAIR_TO_PIN[repair], forgive=repair is Repair.LOAD_AGAIN)
    return None if answer.status_code in _OK else _read_message(answer.content, answer.status_code)


def _read_message(body: bytes, status: int) -> str:
    """The sentence of an engine's error; what it quotes may come from a tenant's file."""
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (*UNREADABLE, TypeError, KeyError):
        return f"the replica answered {status}"
    return "".join(char if char.isprintable() else " " for char in message)[:300]


def _count_nothing(kind: str, *, is_made: bool) -> None:
    """Nobody counts."""


def _build_done(difference: Difference, action: str, found: Open, now: float) -> Done:
    return Done(
        at=datetime.now(UTC),
        kind=difference.kind,
        subject=difference.subject,
        digest=difference.digest,
        action=action,
        took_s=round(now - found.begun_at, 3),
    )


def _build_event(difference: Difference, action: str, found: Open, now: float, /, **more: Any) -> FleetEvent:
    alias = difference.alias
    return FleetEvent(
        action=f"fleet.{action}",
        subject=difference.subject,
        tenant_id=None if alias is None else alias.tenant_id,
        tenant=None if alias is None else alias.tenant,
        details={
            "kind": difference.kind,
            "desired": difference.desired,
            "actual": difference.actual,
            "digest": difference.digest,
            "attempts": found.num_attempts,
            "after_s": round(now - found.begun_at, 3),
            **more,
        },
    )
