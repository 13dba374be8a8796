"""Whoever shares a block reads what it would have computed itself, through every way in which requests end or yield.

In place of a model, `PaperModel` writes into each cell what its K and V depend on: all tokens up to it, the adapter
that acts and from where, and the tenant. A row that reads anything else, or a NaN that is not its own, fails the test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from loraplex_engine.core.request import Request
from loraplex_engine.core.step import StepPlan, StepResult
from loraplex_engine.errors import StepFailedError
from loraplex_engine.wire.messages import TokenEvent
from schedules import World

Cell = tuple[int, bool] | None
_SIZE = 4


def _salt(request: Request, position: int) -> tuple[object, ...]:
    is_adapted = request.digest is not None and position >= request.adapter_start
    return (request.tenant_id, request.digest, request.adapter_start) if is_adapted else (request.tenant_id,)


@dataclass
class PaperModel:
    """KV blocks as (what the cell depends on, whether it is finite) per cell; the numbers of `bad` requests go bad."""

    num_blocks: int
    bad: set[str] = field(default_factory=set)
    cells: dict[int, list[Cell]] = field(default_factory=dict)
    num_copies: int = 0

    def __post_init__(self) -> None:
        self.cells = {block_id: [None] * _SIZE for block_id in range(self.num_blocks)}

    def execute(self, plan: StepPlan, chance: random.Random) -> StepResult:
        self._copy(plan.block_copies)
        written: set[tuple[int, int]] = set()
        sampled: dict[str, int] = {}
        invalid, vouched = set(), set()
        for row in plan.rows:
            self._write(row.request, row.start, row.stop, written)
        for row in plan.rows:
            request_id = row.request.request_id
            is_finite = self._read(row.request, row.stop)
            if not is_finite:
                assert request_id in self.bad, "it met the NaN of another"
            if row.samples and is_finite:
                sampled[request_id] = chance.randrange(1, 4)
            elif row.samples:
                invalid.add(request_id)
            elif is_finite and chance.random() < 0.8:
                vouched.add(request_id)
        return StepResult(sampled, frozenset(invalid), vouched=frozenset(vouched))

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        sources, targets = {source for source, _ in pairs}, [target for _, target in pairs]
        assert len(set(targets)) == len(targets)
        assert sources.isdisjoint(targets)
        for source, target in pairs:
            self.cells[target] = list(self.cells[source])
        self.num_copies += len(pairs)

    def _write(self, request: Request, start: int, stop: int, written: set[tuple[int, int]]) -> None:
        for position in range(start, stop):
            block_id, offset = request.block_ids[position // _SIZE], position % _SIZE
            assert (block_id, offset) not in written, "two requests write into one cell"
            written.add((block_id, offset))
            is_finite = request.request_id not in self.bad or position < stop - 1
            self.cells[block_id][offset] = self._depends_on(request, position), is_finite

    def _read(self, request: Request, stop: int) -> bool:
        is_finite = True
        for position in range(stop):
            cell = self.cells[request.block_ids[position // _SIZE]][position % _SIZE]
            assert cell is not None
            assert cell[0] == self._depends_on(request, position), "it read what is not its own"
            is_finite &= cell[1]
        return is_finite

    def _depends_on(self, request: Request, position: int) -> int:
        return hash((*request.token_ids(0, position + 1), _salt(request, position)))


class Storm:
    """Requests that arrive, end, break off, fail and yield at random; every act is followed by a check."""

    def __init__(self, seed: int, num_requests: int, num_blocks: int) -> None:
        self.chance = random.Random(seed)
        self.num_requests = num_requests
        self.world = World(num_blocks, budget=14, max_num_seqs=5, queue_timeout_s=1e9, max_model_len=40)
        self.world.loader.invocation_ids["c"] = (2, 3)
        self.world.load("a", "c")
        self.model = PaperModel(num_blocks)
        self.requests: dict[str, Request] = {}
        self.ended: list[str] = []
        self.num_failed_steps = 0

    def run(self) -> None:
        while len(self.ended) < self.num_requests:
            self.world.clock.now += 0.05
            act = self.chance.random()
            if len(self.requests) < self.num_requests and act < 0.5 and len(self.world.scheduler.waiting) < 12:
                self._add()
            elif act < 0.53 and self.requests:
                self._abort()
            else:
                self._step()
            self.world.scheduler.check_integrity()
        assert sorted(self.ended, key=int) == list(map(str, range(self.num_requests)))

    def _add(self) -> None:
        name = str(len(self.requests))
        if self.chance.random() < 0.02:
            self.model.bad.add(name)
        pattern = [1, 2, 3, 1, 2, 3, 3, 2, 1, 2, 3, 1, 1, 2, 3, 2, 2, 3, 1, 3]
        prompt = [*pattern[: self.chance.randint(2, 20)], *self.chance.choices([1, 2, 3], k=self.chance.randint(0, 3))]
        self.requests[name] = self.world.request(
            name,
            [*prompt, 2, 3] if self.chance.random() < 0.3 else prompt,
            self.chance.choice([None, "a", "c"]),
            self.chance.randint(1, 8),
            self.chance.choice("xy"),
            self.chance.choice([0, 0, 0, 1, -1]),
            ignore_eos=True,
        )

    def _abort(self) -> None:
        scheduler = self.world.scheduler
        here = [*scheduler.running, *scheduler.waiting]
        if here:
            event = scheduler.abort(self.chance.choice(here).request_id, "abort")
            assert event is not None
            self._note([event])

    def _step(self) -> None:
        scheduler = self.world.scheduler
        plan = scheduler.schedule()
        scheduler.check_integrity()
        self._note(plan.ended)
        if plan.rows and self.chance.random() < 0.01:
            self.num_failed_steps += 1
            self._note(scheduler.fail_plan(plan, StepFailedError()))
            return
        self._note(scheduler.update(plan, self.model.execute(plan, self.chance)))

    def _note(self, events: list[TokenEvent]) -> None:
        for event in events:
            if not event.finish:
                continue
            self.ended.append(event.request_id)
            request = self.requests[event.request_id]
            assert event.stats is not None
            assert event.stats.cached_tokens == request.num_cached < len(request.prompt_ids)
            assert event.stats.completion_tokens == len(request.output_ids)


@pytest.mark.endure
@pytest.mark.parametrize(("seed", "num_blocks"), [(1, 12), (2, 16), (3, 40), (4, 40)])
def test_counts_and_contents_are_exact_over_ten_thousand_requests(
    seed: int, num_blocks: int, long: Callable[[float, float], float]
) -> None:
    storm = Storm(seed, int(long(1000, 2500)), num_blocks)
    storm.run()
    scheduler, pool = storm.world.scheduler, storm.world.pool
    assert pool.num_free == num_blocks
    assert storm.num_failed_steps > 0
    assert storm.model.num_copies > 100
    assert scheduler.prefixes.num_waits > 0
    assert (scheduler.num_preemptions > 0) == (num_blocks < 30)
    started = [request for request in storm.requests.values() if request.started_at is not None]
    assert scheduler.num_prefix_queries == sum(len(request.prompt_ids) for request in started)
    assert scheduler.num_prefix_hits == sum(request.num_cached for request in started)
    assert scheduler.num_preemptions == sum(request.preemptions for request in started)
