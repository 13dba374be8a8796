"""Tenants share the engine by weighted virtual token counters. `VirtualTokens` counts and compares; it moves nothing.

1. A tenant's counter grows by what the engine does for it, over its weight: prompt tokens as they are computed, a tenth
   of those that the cache had, sampled tokens, and one token for so many bytes of adapters put into slots.
2. The tenant with the lowest counter has the next turn: in the queue, in the time for prompts, in what is loaded. Its
   own requests stay in the order of priority and arrival. Towards others a priority counts as so many tokens: it moves
   a tenant's service in time, and adds nothing to it.
3. Virtual time is the lowest counter of those that wait, and never goes back. Who comes for the first time starts from
   it, who comes back is lifted to it but for a small credit: nobody saves up a share while away, and a tenant below its
   share need not count single requests.
4. Ageing: what a tenant is ahead of the others counts less the longer it waits for a turn, and nothing after `AGE_S`.
   A long queue does not age while requests of its tenant start.
5. A tenant below its share of seats or blocks takes some of a tenant's that is above its own and has a higher counter.
   That one keeps its share, its oldest requests, and its place in the queue for what it gave.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), of which 1 and the lift in 3 are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from loraplex_engine.core.request import Request
from loraplex_engine.scheduling.policy import Standing, priority_of, youngest_of

CACHED_SHARE = 0.1
"""What a token costs that the prefix cache had."""
LOAD_BYTES_PER_TOKEN = 16_384
"""Of an adapter put into a slot: one of rank 16 for a base of 135M parameters costs about as much as 600 tokens."""
CREDIT = 2048.0
"""Weighted tokens by which a tenant may be behind the others when it comes: some requests' worth."""
AGE_S = 15.0
PRIORITY_TOKENS = 256.0
"""What a priority counts towards other tenants, weighted tokens."""
_TURN_S, _DUE_S = 2.0, 5.0
"""Seconds after which those that had to yield take turns with what else their tenant runs; those after which a tenant
without a seat takes one that a request of another has had for a turn, where there are more tenants than seats."""
_EXPECTED_TOKENS = 64
"""Tokens of an answer, to compare requests that could start in the same step; only what comes is charged."""
_LOOK_AHEAD = 32
"""Requests of one tenant that are compared with others' in one step; those behind them wait anyway."""
_MAX_ACCOUNTS = 4096


@dataclass(slots=True)
class Account:
    """One tenant's counter: weighted tokens, and when it had its last turn."""

    served: float
    weight: float = 1.0
    turn_at: float = 0.0


class VirtualTokens:
    """The counters of all tenants of one engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tenant_to_account: dict[str, Account] = {}
        self._now = 0.0
        self._tags: dict[Request, float] = {}
        self._tenant_to_tag: dict[str, float] = {}
        self._tenant_to_next: dict[str, Request] = {}
        self._denied: set[str] = set()

    # turns

    def arrange(self, line: list[Request]) -> list[Request]:
        """Put requests, in the order of priority and arrival, in the order of their tenants' turns."""
        self._denied.clear()
        tenant_to_line: dict[str, list[Request]] = {}
        for request in line:
            tenant_to_line.setdefault(request.tenant_id, []).append(request)
        self._move_on(tenant_to_line)
        self._tags.clear()
        self._tenant_to_next = _find_longest_yielded(line)
        self._tenant_to_tag = {
            tenant: self._find_tag(self._tenant_to_account[tenant], own[0], 0.0)
            for tenant, own in tenant_to_line.items()
        }
        if len(tenant_to_line) < 2:
            return line
        for tenant, own in tenant_to_line.items():
            account, ahead, tag = self._tenant_to_account[tenant], 0.0, -math.inf
            for request in own[:_LOOK_AHEAD]:
                # never before those of its own that are in front of it
                self._tags[request] = tag = max(tag, self._find_tag(account, request, ahead))
                if request.started_at is None:
                    tokens = len(request.prompt_ids) + min(request.params.max_tokens, _EXPECTED_TOKENS)
                    ahead += tokens / account.weight
        tags = self._tags
        heads = sorted(tags, key=lambda request: (tags[request], request.arrival))
        return [*heads, *(request for request in line if request not in tags)]

    def merge(self, prompts: Sequence[Request], line: list[Request]) -> list[Request]:
        """Put running requests whose prompts are not computed yet into a line; a tenant's own begun ones go first."""
        if not prompts:
            return line
        num_heads = len(self._tags) or min(1, len(line))
        tags = {request: self._tenant_to_tag[request.tenant_id] for request in line[:num_heads]} | self._tags
        for request in prompts:
            served = self._account(request).served
            tags[request] = min(served, self._tenant_to_tag.get(request.tenant_id, served))
        merged = sorted([*prompts, *line[:num_heads]], key=lambda request: tags[request])
        if self._tags:
            return [*merged, *line[num_heads:]]
        # of those that wait, all of one tenant, the others follow the first
        behind = merged.index(line[0]) + 1 if line else 0
        return [*merged[:behind], *line[1:], *merged[behind:]]

    # counters

    def note_start(self, request: Request, num_cached: int) -> None:
        """A request leaves the queue; the first time, so many tokens of its prompt need not be computed."""
        account = self._account(request)
        account.turn_at = self._clock()
        if request.started_at is None:
            request.num_charged = num_cached
            account.served += CACHED_SHARE * num_cached / account.weight

    def note_yield(self, request: Request) -> None:
        """A running request gave its place to another."""
        self._account(request).turn_at = self._clock()

    def note_load(self, request: Request, num_bytes: int) -> None:
        """An adapter was put into a slot for a request."""
        account = self._account(request)
        account.served += num_bytes / LOAD_BYTES_PER_TOKEN / account.weight

    def note_computed(self, request: Request, stop: int) -> None:
        """Tokens of a request before position `stop` are computed; its prompt's are charged, each once."""
        stop = min(stop, len(request.prompt_ids))
        if stop > request.num_charged:
            account = self._account(request)
            account.served += (stop - request.num_charged) / account.weight
            request.num_charged = stop

    def note_sampled(self, request: Request) -> None:
        """A request has one more token."""
        account = self._account(request)
        account.served += 1 / account.weight

    # who yields

    def find_yielding(self, request: Request, running: Collection[Request], num_seats: int) -> Request | None:
        """The running request whose seat a waiting one takes, as all seats are taken; None if it must wait.

        Args:
            request: Waits, and could start.
            running: Those that may yield.
            num_seats: Requests that run at once.
        """
        if request.tenant_id in self._denied:
            return None
        tenant_to_seats = Counter(other.tenant_id for other in running)
        yielding = self._choose(request, running, tenant_to_seats, needed=1, total=num_seats, least=1)
        if yielding is None and request is self._tenant_to_next.get(request.tenant_id):
            if request.turn_at <= self._clock() - _TURN_S:
                own = (other for other in running if other.tenant_id == request.tenant_id)
                yielding = self._find_long_running(own)
        elif yielding is None and request.tenant_id not in self._tenant_to_next:
            self._denied.add(request.tenant_id)
        return yielding

    def find_holder(
        self, request: Request, running: Collection[Request], num_needed: int, num_blocks: int
    ) -> Request | None:
        """The running request that gives its blocks to a waiting one that needs so many; None if it must wait."""
        tenant_to_ids: dict[str, set[int]] = {}
        for other in running:
            tenant_to_ids.setdefault(other.tenant_id, set()).update(other.block_ids)
        tenant_to_blocks = {tenant: len(ids) for tenant, ids in tenant_to_ids.items()}
        return self._choose(request, running, tenant_to_blocks, needed=num_needed, total=num_blocks, least=0)

    def may_queue(self, request: Request, waiting: Iterable[Request], max_waiting: int) -> bool:
        """Whether a request may join a full queue: while its tenant has less than its share of it, at least one."""
        tenant_to_number = Counter(other.tenant_id for other in waiting)
        weights = {tenant: self._weight(tenant) for tenant in tenant_to_number} | {request.tenant_id: request.weight}
        share = max_waiting * request.weight / sum(weights.values())
        return tenant_to_number[request.tenant_id] + 1 <= max(min(1, max_waiting), share)

    def find_shares(self, tenants: Collection[str], total: int) -> dict[str, float]:
        """How much of something each of some tenants may have, one at least."""
        unit = total / max(1.0, sum(self._weight(tenant) for tenant in tenants))
        return {tenant: max(1.0, unit * self._weight(tenant)) for tenant in tenants}

    def describe(self, waiting: Iterable[Request], running: Iterable[Request]) -> list[Standing]:
        """How the tenants stand that have requests here."""
        num_waiting = Counter(request.tenant_id for request in waiting)
        num_running = Counter(request.tenant_id for request in running)
        return [
            Standing(tenant, account.weight, num_waiting[tenant], num_running[tenant], account.served - self._now)
            for tenant in sorted({*num_waiting, *num_running})
            if (account := self._tenant_to_account.get(tenant)) is not None
        ]

    def check_integrity(self) -> None:
        """Assert that the counters make sense."""
        assert len(self._tenant_to_account) <= _MAX_ACCOUNTS
        assert all(account.weight > 0 for account in self._tenant_to_account.values())

    def _move_on(self, tenant_to_line: Mapping[str, Sequence[Request]]) -> None:
        """Let virtual time follow those that wait, and lift who was away."""
        able = []
        for tenant, own in tenant_to_line.items():
            account = self._tenant_to_account.get(tenant) or self._open(tenant)
            account.weight = own[-1].weight
            account.served = max(account.served, self._now - CREDIT / max(1.0, account.weight))
            if any(request.load_wait_at is None for request in own):
                able.append(account.served)
        if able:
            self._now = max(self._now, min(able))

    def _find_tag(self, account: Account, request: Request, ahead: float) -> float:
        """A tenant's counter when a request has its turn, after so much before it; less for what both have waited."""
        tag = account.served + ahead + PRIORITY_TOKENS * priority_of(request)
        age = min(1.0, self._waited_s(account, request) / AGE_S)
        return tag - age * max(0.0, tag - (self._now - CREDIT))

    def _waited_s(self, account: Account, request: Request) -> float:
        return self._clock() - max(account.turn_at, request.arrived_at)

    def _choose(
        self,
        request: Request,
        running: Collection[Request],
        tenant_to_use: Mapping[str, int],
        *,
        needed: int,
        total: int,
        least: int,
    ) -> Request | None:
        """Of the tenant that is furthest above its share the youngest request, if `request`'s tenant is below its."""
        tenant = request.tenant_id
        tag, account = self._tenant_to_tag.get(tenant), self._account(request)
        if tag is None:
            return None
        weights = {name: self._weight(name) for name in {*self._tenant_to_tag, *tenant_to_use}}
        unit = total / sum(weights.values())
        own_use = tenant_to_use.get(tenant, 0)
        if own_use + needed > max(least, unit * account.weight):
            return None
        behind = {name for name in tenant_to_use if name != tenant and self._served(name) >= tag}
        above = [name for name in behind if tenant_to_use[name] > max(least, unit * weights[name])]
        if above:
            most = max(above, key=lambda name: (tenant_to_use[name] / weights[name], name))
            candidates = [other for other in running if other.tenant_id == most]
            return youngest_of(candidates) if len(candidates) > 1 else None
        if own_use == 0 and self._waited_s(account, request) >= _DUE_S:
            return self._find_long_running(other for other in running if other.tenant_id in behind)
        return None

    def _find_long_running(self, running: Iterable[Request]) -> Request | None:
        """The request whose turn has been over for longest."""
        over = [request for request in running if request.turn_at <= self._clock() - _TURN_S]
        return min(over, key=lambda request: request.turn_at, default=None)

    def _account(self, request: Request) -> Account:
        return self._tenant_to_account.get(request.tenant_id) or self._open(request.tenant_id, request.weight)

    def _served(self, tenant: str) -> float:
        account = self._tenant_to_account.get(tenant)
        return self._now if account is None else account.served

    def _weight(self, tenant: str) -> float:
        account = self._tenant_to_account.get(tenant)
        return 1.0 if account is None else account.weight

    def _open(self, tenant: str, weight: float = 1.0) -> Account:
        if len(self._tenant_to_account) >= _MAX_ACCOUNTS:
            self._forget()
        account = self._tenant_to_account[tenant] = Account(self._now, weight)
        return account

    def _forget(self) -> None:
        """Forget the half that were served least of late; who comes back is lifted to where it would be anyway."""
        ranked = sorted(self._tenant_to_account.items(), key=lambda pair: (pair[1].turn_at, pair[0]))
        self._tenant_to_account = dict(ranked[len(ranked) // 2 :])


def _find_longest_yielded(line: Sequence[Request]) -> dict[str, Request]:
    """Of each tenant's requests that have begun and wait the one that has waited longest."""
    tenant_to_request: dict[str, Request] = {}
    for request in line:
        if request.started_at is not None:
            first = tenant_to_request.setdefault(request.tenant_id, request)
            if request.turn_at < first.turn_at:
                tenant_to_request[request.tenant_id] = request
    return tenant_to_request
