"""Who goes first, and who must yield. Nothing here moves a request.

Waiting requests are in the order of priority and arrival, on one scale: a request of priority p stands where one of
priority 0 would that arrived `AGEING_S * p` later. So waiting lifts a request by one priority every `AGEING_S`, and as
priorities count within `MAX_PRIORITY` of 0, nothing that arrives `2 * MAX_PRIORITY * AGEING_S` later goes before it.
A `FairShare` then lets tenants take turns, and says who yields to whom.

When blocks run out, the tenant that holds most of them for its weight loses its youngest request of the last priority.
The oldest running request never yields: it always ends, and then the next one is the oldest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from loraplex_engine.core.request import Request

AGEING_S = 5.0
MAX_PRIORITY = 8


@dataclass(frozen=True, slots=True)
class Standing:
    """How one tenant stands at the moment; `lead`: weighted tokens by which it is ahead of who has the next turn."""

    tenant: str
    weight: float
    waiting: int
    running: int
    lead: float


class FairShare(Protocol):
    """How tenants share the engine."""

    def arrange(self, line: list[Request]) -> list[Request]:
        """Put the waiting requests of a step, in the order of priority and arrival, in the order of their turns."""

    def merge(self, prompts: Sequence[Request], line: list[Request]) -> list[Request]:
        """Put running requests whose prompts are not computed yet, oldest first, into the line that was arranged."""

    def note_start(self, request: Request, num_cached: int) -> None:
        """A request starts, with so many tokens that it need not compute; `started_at` is that of its first start."""

    def note_yield(self, request: Request) -> None:
        """A running request gave its place to another."""

    def note_load(self, request: Request, num_bytes: int) -> None:
        """An adapter was put into a slot for a request."""

    def note_computed(self, request: Request, stop: int) -> None:
        """The tokens of a request before position `stop` are computed."""

    def note_sampled(self, request: Request) -> None:
        """A request has one more token."""

    def find_yielding(self, request: Request, running: Collection[Request], num_seats: int) -> Request | None:
        """The running request whose seat a waiting one takes when all are taken; None if it must wait."""

    def find_holder(
        self, request: Request, running: Collection[Request], num_needed: int, num_blocks: int
    ) -> Request | None:
        """The running request whose blocks a waiting one takes when it lacks some of so many; None if it must wait."""

    def may_queue(self, request: Request, waiting: Iterable[Request], max_waiting: int) -> bool:
        """Whether a request may join a queue that is full."""

    def find_shares(self, tenants: Collection[str], total: int) -> dict[str, float]:
        """How much of something each of some tenants may have, one at least; nothing where all are one crowd."""

    def describe(self, waiting: Iterable[Request], running: Iterable[Request]) -> list[Standing]:
        """How the tenants stand whose requests these are, for `GET /internal/state`."""

    def check_integrity(self) -> None:
        """Assert that it makes sense."""


class AgeOnly:
    """All tenants alike: each request is one of the crowd, and nobody yields."""

    def arrange(self, line: list[Request]) -> list[Request]:
        """As it is."""
        return line

    def merge(self, prompts: Sequence[Request], line: list[Request]) -> list[Request]:
        """Who has begun goes first."""
        return [*prompts, *line]

    def note_start(self, request: Request, num_cached: int) -> None:
        """No matter."""

    def note_yield(self, request: Request) -> None:
        """No matter."""

    def note_load(self, request: Request, num_bytes: int) -> None:
        """No matter."""

    def note_computed(self, request: Request, stop: int) -> None:
        """No matter."""

    def note_sampled(self, request: Request) -> None:
        """No matter."""

    def find_yielding(self, request: Request, running: Collection[Request], num_seats: int) -> Request | None:
        """Nobody."""

    def find_holder(
        self, request: Request, running: Collection[Request], num_needed: int, num_blocks: int
    ) -> Request | None:
        """Nobody."""

    def may_queue(self, request: Request, waiting: Iterable[Request], max_waiting: int) -> bool:  # noqa: ARG002
        """Full is full, whoever asks."""
        return False

    def find_shares(self, tenants: Collection[str], total: int) -> dict[str, float]:  # noqa: ARG002
        """There are none."""
        return {}

    def describe(self, waiting: Iterable[Request], running: Iterable[Request]) -> list[Standing]:  # noqa: ARG002
        """There are none."""
        return []

    def check_integrity(self) -> None:
        """It always does."""


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
    return request.arrived_at + AGEING_S * priority_of(request), request.arrival


def priority_of(request: Request) -> int:
    """A request's priority within the bounds."""
    return min(MAX_PRIORITY, max(-MAX_PRIORITY, request.priority))


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
    weights = {group_of(request): request.weight for request in candidates}
    greediest = max(group_to_blocks, key=lambda group: len(group_to_blocks[group]) / weights[group])
    return youngest_of(request for request in candidates if group_of(request) == greediest)


def youngest_of(requests: Iterable[Request]) -> Request:
    """The youngest request of the last priority."""
    return max(requests, key=lambda request: (request.priority, request.arrival))
