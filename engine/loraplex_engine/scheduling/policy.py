"""Who goes first, and who must yield. Nothing here moves a request.

Waiting requests are in the order of priority and arrival, on one scale: a request of priority p stands where one of
priority 0 would that arrived `AGEING_S * p` later. So waiting lifts a request by one priority every `AGEING_S`, and as
priorities count within `MAX_PRIORITY` of 0, nothing that arrives `2 * MAX_PRIORITY * AGEING_S` later goes before it.
A `FairShare` may then let tenants take turns.

When blocks run out, the tenant that holds most of them loses its youngest request of the last priority. The oldest
running request never yields: it always ends, and then the next one is the oldest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from loraplex_engine.core.request import Request

AGEING_S = 5.0
MAX_PRIORITY = 8


class FairShare(Protocol):
    """How tenants share the engine."""

    def arrange(self, line: list[Request]) -> list[Request]:
        """Put the waiting requests of a step, in the order of priority and arrival, in the order of their turns."""


class AgeOnly:
    """All tenants alike: each request is one of the crowd."""

    def arrange(self, line: list[Request]) -> list[Request]:
        """As it is."""
        return line


class WaitingLine(Collection[Request]):
    """Waiting requests in the order of priority and arrival."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._find(request) is not None

    def add(self, request: Request) -> None:
        """Let a request wait in its place, also one that has run already."""
        insort(self._requests, request, key=_place)

    def remove(self, request: Request) -> None:
        """The request waits no more."""
        index = self._find(request)
        assert index is not None
        del self._requests[index]

    def _find(self, request: Request) -> int | None:
        index = bisect_left(self._requests, _place(request), key=_place)
        is_here = index < len(self._requests) and self._requests[index] is request
        return index if is_here else None


def _place(request: Request) -> tuple[float, int]:
    priority = min(MAX_PRIORITY, max(-MAX_PRIORITY, request.priority))
    return request.arrived_at + AGEING_S * priority, request.arrival


def tenant_of(request: Request) -> str:
    """Whose request it is: blocks are counted by tenant."""
    return request.tenant_id


def choose_victim(
    running: Collection[Request], needy: Request, group_of: Callable[[Request], str] = tenant_of
) -> Request:
    """The running request that gives its blocks back so that `needy` can go on; maybe `needy` itself.

    It never is an older request of `needy`'s tenant at the same priority, nor the oldest of all, unless that is alone.
    """
    oldest = min(running, key=lambda request: request.arrival)
    candidates = [request for request in running if request is not oldest] or [needy]
    group_to_blocks: dict[str, set[int]] = {}
    for request in candidates:
        group_to_blocks.setdefault(group_of(request), set()).update(request.block_ids)
    greediest = max(group_to_blocks, key=lambda group: len(group_to_blocks[group]))
    of_greediest = [request for request in candidates if group_of(request) == greediest]
    return max(of_greediest, key=lambda request: (request.priority, request.arrival))
