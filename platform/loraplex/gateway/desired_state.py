"""What is wanted of the fleet, as of now: from the operator's pins and from all names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from loraplex.errors import LoraplexError
from loraplex.fleet.desired import BrokenAlias, Content, Desired, Naming, PinGoal
from loraplex.fleet.pools import Pin, Pool
from loraplex.gateway.names import LIVE, NameIndex
from loraplex.gateway.resolution import Caller, Resolved, resolve

_EVERYONE = Caller(tenant=None, bases=None)
"""An operator pins what any tenant has."""

_FIND_EVERY_S = 4.0
_FIND_TIMEOUT_S = 6.0
_log = logging.getLogger(__name__)


class DesiredState:
    """Reads what is wanted.

    Args:
        find_pools: Say what is pinned; they may be others at another time.
        names: Say which content that is, and what else can be called.
        find_broken: Looks in the database for aliases that lead nowhere; it is asked every few seconds.
    """

    def __init__(
        self,
        find_pools: Callable[[], Sequence[Pool]],
        names: NameIndex,
        find_broken: Callable[[], Awaitable[list[BrokenAlias]]],
    ) -> None:
        self._find_pools = find_pools
        self._names = names
        self._find_broken = find_broken
        self._broken: tuple[BrokenAlias, ...] = ()
        self._find_at = 0.0

    async def read(self) -> Desired:
        """Return what is wanted now; while the database is away, with the broken aliases that were known.

        Raises:
            LoraplexError: Names cannot be read.
        """
        await self._names.ensure_fresh()
        if time.monotonic() >= self._find_at:
            await self._look_for_broken()
        goals = tuple(self._read_goal(pool, pin) for pool in self._find_pools() for pin in pool.pins)
        return Desired(goals=goals, broken=self._broken, find_naming=self._build_naming())

    def look_again(self) -> None:
        """Look for broken aliases at the next reading: one was mended."""
        self._find_at = 0.0

    async def _look_for_broken(self) -> None:
        try:
            async with asyncio.timeout(_FIND_TIMEOUT_S):
                self._broken = tuple(await self._find_broken())
        except (LoraplexError, TimeoutError) as error:
            _log.warning("aliases cannot be looked at: %s", error)
        self._find_at = time.monotonic() + _FIND_EVERY_S

    def _read_goal(self, pool: Pool, pin: Pin) -> PinGoal:
        """What a pin means now: all of its versions that can be pinned, and if none can, why not."""
        contents: list[Content] = []
        problems: list[str] = []
        for model in self._list_versions(pin.model):
            try:
                contents.append(_read_content(resolve(model, _EVERYONE, self._names, ""), pool))
            except LoraplexError as error:
                problems.append(error.message)
        problem = None if contents else problems[0]
        return PinGoal(pool=pool.name, model=pin.model, copies=pin.copies, contents=tuple(contents), problem=problem)

    def _list_versions(self, model: str) -> list[str]:
        """All that a name means: an alias with weights means each of its targets."""
        full_name, _, reference = model.partition("@")
        tenant, _, name = full_name.partition("/")
        adapter = self._names.find_adapter(tenant, name) if name else self._names.find_default(tenant)
        targets = () if adapter is None else adapter.aliases.get(reference or LIVE, ())
        if adapter is None or len(targets) < 2:
            return [model]
        return [f"{adapter.tenant}/{adapter.name}@{target.version}" for target in targets]

    def _build_naming(self) -> Callable[[str, str], Naming]:
        callable_, retired = self._names.list_contents()

        def find(base: str, digest: str) -> Naming:
            if (base, digest) in callable_:
                return Naming.CALLABLE
            return Naming.RETIRED if (base, digest) in retired else Naming.NAMELESS

        return find


def _read_content(resolved: Resolved, pool: Pool) -> Content:
    if resolved.version is None:
        raise LoraplexError(f"{resolved.full_name} is a base, which is always there")
    if resolved.pool is not None:
        raise LoraplexError(f"{resolved.full_name} is a full fine-tune, which the pool {resolved.pool} always serves")
    if resolved.base != pool.base:
        raise LoraplexError(f"{resolved.full_name} is for {resolved.base}, and the pool serves {pool.base}")
    return Content(
        name=resolved.full_name, digest=resolved.version.digest, rank=resolved.rank, weights=resolved.weights
    )
