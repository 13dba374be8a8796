"""Asks every engine for its state, one question at a time to each; a slow one holds nobody up.

Only `Lookout` writes what engines last said. A replica that refuses a connection is out at once; one that is only slow
keeps what it said last for three tries.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from loraplex.fleet.pools import Pool
from loraplex.fleet.view import Replica
from loraplex_engine.wire.client import ReplicaFailedError, UnreachableError

ANSWER_S = 5.0
PATIENCE_S = 1.0
_MAX_SLOW = 3
_SILENT = "it does not say its state"

Place = tuple[Pool, str]
"""An engine's pool and URL."""


class Lookout:
    """What engines say of themselves.

    Args:
        ask: Gets the state of the engine at a URL.
        judge: Makes a replica of a state.
    """

    def __init__(
        self,
        ask: Callable[[str], Awaitable[dict[str, Any]]],
        judge: Callable[[Pool, str, dict[str, Any]], Replica],
    ) -> None:
        self._ask = ask
        self._judge = judge
        self._questions: dict[str, asyncio.Task[Replica]] = {}
        self._known: dict[str, Replica] = {}
        self._num_slow: Counter[str] = Counter()

    async def look(self, places: Sequence[Place], patience_s: float = PATIENCE_S) -> list[Replica]:
        """Return the replicas at `places`, in their order; for those that take longer, what they said last."""
        for pool, url in places:
            if url not in self._questions:
                self._questions[url] = asyncio.create_task(self._ask_one(pool, url))
        asked = [self._questions[url] for _, url in places]
        if asked:
            await asyncio.wait(asked, timeout=patience_s)
        for url in [url for url, question in self._questions.items() if question.done()]:
            self._known[url] = self._questions.pop(url).result()
        return [self._known.get(url) or down(pool, url, _SILENT) for pool, url in places]

    def look_away(self) -> None:
        """Take no answer any more to what was asked before now."""
        for question in self._questions.values():
            question.cancel()
        self._questions.clear()

    def forget(self, url: str) -> None:
        """Forget an engine that is no longer there."""
        question = self._questions.pop(url, None)
        if question is not None:
            question.cancel()
        self._known.pop(url, None)
        del self._num_slow[url]

    async def stop(self) -> None:
        """Ask no more."""
        questions = list(self._questions.values())
        self.look_away()
        await asyncio.gather(*questions, return_exceptions=True)

    async def _ask_one(self, pool: Pool, url: str) -> Replica:
        try:
            async with asyncio.timeout(ANSWER_S):
                state = await self._ask(url)
        except UnreachableError:
            return down(pool, url, "it cannot be reached")
        except (ReplicaFailedError, TimeoutError, msgspec.DecodeError):
            return self._note_slow(pool, url)
        if not isinstance(state, dict):
            return self._note_slow(pool, url)
        self._num_slow[url] = 0
        return self._judge(pool, url, state)

    def _note_slow(self, pool: Pool, url: str) -> Replica:
        """Keep what was known of an engine that was slow once or twice."""
        self._num_slow[url] += 1
        known = self._known.get(url)
        is_patient = known is not None and self._num_slow[url] < _MAX_SLOW
        return known if known is not None and is_patient else down(pool, url, _SILENT)


def down(pool: Pool, url: str, problem: str) -> Replica:
    """Return the replica of an engine that gets no traffic."""
    return Replica(url=url, pool=pool.name, base=pool.base, model=pool.model, problem=problem)
