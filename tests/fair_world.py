"""Tenants at a simulated engine: the real scheduler, a clock that moves by the predicted seconds of a step."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from loraplex_engine.core.request import Request
from loraplex_engine.core.step import StepPlan, StepResult
from loraplex_engine.scheduling.budget import StepBudget
from loraplex_engine.scheduling.cost import StepCost
from loraplex_engine.scheduling.fair import VirtualTokens
from loraplex_engine.scheduling.policy import AgeOnly, FairShare
from schedules import Clock, World

IDLE_S = 0.002
_TURNAROUND_S = 0.005
"""From the last token of an answer to the client's next request."""


@dataclass
class Tenant:
    """Clients that send again `think_s` after they were answered; one number of tokens, or a range to choose from."""

    name: str
    num_clients: int
    prompt: tuple[int, int] = (64, 192)
    output: tuple[int, int] = (32, 96)
    weight: float = 1
    priority: int = 0
    digests: Sequence[str | None] = (None,)
    think_s: float = 0.0
    from_s: float = 0.0


@dataclass
class Record:
    """What one tenant had: seconds to first tokens, tokens, and the longest time without a token while it waited."""

    ttfts_s: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    starved_s: float = 0.0
    longest_gap_s: float = 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 when all have the same, 1/n when one has all; 0 when nobody has anything."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values)) if any(values) else 0.0


class FairWorld:
    """`run` lets tenants send for a while; the share is the engine's, or none."""

    def __init__(
        self,
        tenants: Sequence[Tenant],
        *,
        is_fair: bool = True,
        seed: int = 0,
        num_blocks: int = 1 << 14,
        max_num_seqs: int = 16,
        num_slots: int = 8,
        **limits: float,
    ) -> None:
        self.cost = StepCost()
        clock = Clock()
        self.share: FairShare = VirtualTokens(clock) if is_fair else AgeOnly()
        self.world = World(
            num_blocks,
            num_slots,
            2048,
            max_num_seqs,
            64,
            8192,
            StepBudget(self.cost),
            self.share,
            clock,
            **{"queue_timeout_s": 600.0, "adapter_load_timeout_s": 600.0, **limits},
        )
        self.records: dict[str, Record] = defaultdict(Record)
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self._chance = random.Random(seed)
        self._begun_at = self.world.clock.now
        self._due: list[tuple[float, str]] = [
            (self._begun_at + tenant.from_s + self._chance.random() * 0.2, tenant.name)
            for tenant in tenants
            for _ in range(tenant.num_clients)
        ]
        self._open: dict[str, Request] = {}
        self._fed_at: dict[str, float] = {}
        self._sent_at: dict[Request, float] = {}
        self._num_sent = 0
        digests = {digest for tenant in tenants for digest in tenant.digests if digest is not None}
        self.world.load(*sorted(digests))

    def run(self, seconds: float, warm_s: float = 0.0) -> dict[str, Record]:
        """Let the tenants send; returns what each had after `warm_s`, and no request of them stays."""
        clock = self.world.clock
        end_at = clock.now + seconds
        while clock.now < end_at:
            if warm_s and clock.now >= self._begun_at + warm_s:
                warm_s = 0.0
                self.records.clear()
            self._send()
            self._step()
        for request in list(self._open.values()):
            self.world.scheduler.abort(request.request_id, "abort")
        self._open.clear()
        self.world.scheduler.check_integrity()
        return self.records

    def _send(self) -> None:
        now = self.world.clock.now
        for due in [due for due in self._due if due[0] <= now]:
            self._due.remove(due)
            self._ask(self.tenants[due[1]], due[0])

    def _ask(self, tenant: Tenant, sent_at: float) -> None:
        self._num_sent += 1
        ids = [self._chance.randrange(1, 1 << 30) for _ in range(self._chance.randint(*tenant.prompt))]
        digest = self._chance.choice(tenant.digests)
        name = f"{tenant.name}-{self._num_sent}"
        params = {"ignore_eos": True}
        request = self.world.request(
            name,
            ids,
            digest,
            self._chance.randint(*tenant.output),
            tenant.name,
            tenant.priority,
            weight=tenant.weight,
            **params,
        )
        self._fed_at.setdefault(tenant.name, sent_at)
        self._sent_at[request] = sent_at
        self._open[name] = request

    def _step(self) -> None:
        scheduler, clock = self.world.scheduler, self.world.clock
        self.world.settle_loads()
        errors = scheduler.expire()
        plan = scheduler.schedule()
        sampled = {row.request.request_id: 7 for row in plan.rows if row.samples}
        vouched = frozenset(row.request.request_id for row in plan.rows)
        clock.now += self._seconds(plan) or IDLE_S
        for event in [*errors, *plan.ended, *scheduler.update(plan, StepResult(sampled, vouched=vouched))]:
            request = self._open[event.request_id]
            record = self.records[request.tenant_id]
            if event.error is not None:
                record.errors.append(event.error.code)
            if event.finish is not None:
                del self._open[event.request_id]
                tenant = self.tenants[request.tenant_id]
                think_s = (
                    _TURNAROUND_S + self._chance.expovariate(1 / tenant.think_s) if tenant.think_s else _TURNAROUND_S
                )
                self._due.append((clock.now + think_s, tenant.name))
        for row in plan.rows:
            self._count(row.request, row.num_tokens, has_token=row.samples)

    def _count(self, request: Request, num_tokens: int, *, has_token: bool) -> None:
        now, record = self.world.clock.now, self.records[request.tenant_id]
        record.tokens += num_tokens
        record.starved_s = max(record.starved_s, now - max(self._fed_at[request.tenant_id], self._begun_at))
        self._fed_at[request.tenant_id] = now
        if has_token and len(request.output_ids) == 1:
            record.ttfts_s.append(now - self._sent_at[request])

    def _seconds(self, plan: StepPlan) -> float:
        contexts = [row.stop for row in plan.rows if row.num_tokens == 1]
        chunks = [(row.start, row.num_tokens) for row in plan.rows if row.num_tokens > 1]
        return self.cost.step_s(contexts, chunks)
