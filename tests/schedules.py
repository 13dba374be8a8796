"""A scheduler with everything around it that needs no model: loads that end when told to, a clock that stands still."""

from __future__ import annotations

import mmap
from collections.abc import Callable

from loraplex_engine.core.request import Request
from loraplex_engine.core.step import StepPlan, StepResult
from loraplex_engine.kv.pool import BlockPool
from loraplex_engine.lora.packed import LoadDone, LoadFailed, PackedAdapter
from loraplex_engine.lora.residency import Residency
from loraplex_engine.scheduling.blame import Blame
from loraplex_engine.scheduling.budget import StepBudget
from loraplex_engine.scheduling.limits import Limits
from loraplex_engine.scheduling.policy import FairShare
from loraplex_engine.scheduling.scheduler import Scheduler
from loraplex_engine.slots.table import SlotTable
from loraplex_engine.wire.messages import SamplingParams, TokenEvent

EOS = 0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ManualLoader:
    """A loader whose jobs end when the test says so; adapters are 64 bytes each and act from `invocation_ids` on."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.num_started = 0
        self.invocation_ids: dict[str, tuple[int, ...]] = {}
        self._results: list[PackedAdapter | LoadFailed] = []

    def start(self, digest: str) -> None:
        assert digest not in self.started
        self.started.append(digest)
        self.num_started += 1

    def finish(self, digest: str) -> None:
        facts = LoadDone(digest, 64, 8, (), 0.0, 0.0, 0.0, invocation_ids=self.invocation_ids.get(digest, ()))
        self.hand_over(PackedAdapter(facts, mmap.mmap(-1, 64)))

    def hand_over(self, adapter: PackedAdapter) -> None:
        self.started.remove(adapter.digest)
        self._results.append(adapter)

    def fail(self, digest: str, *, is_content: bool = False) -> None:
        self.started.remove(digest)
        self._results.append(LoadFailed(digest, "fetch", "adapter_loading", "store gone", is_content=is_content))

    def take_finished(self) -> list[PackedAdapter | LoadFailed]:
        results, self._results = self._results, []
        return results


class RecordingBank:
    """Knows what each slot answers with; a slot is cleared once, after it was bound."""

    def __init__(self) -> None:
        self.bound: dict[int, str] = {}

    def bind(self, slot_id: int, adapter: PackedAdapter) -> None:
        self.bound[slot_id] = adapter.digest

    def clear(self, slot_id: int) -> None:
        del self.bound[slot_id]


class World:
    """Scheduler, residency and pool of blocks, with `step` in place of a model."""

    def __init__(
        self,
        num_blocks: int = 16,
        num_slots: int = 2,
        budget: int = 8,
        max_num_seqs: int = 4,
        max_host: int = 4,
        max_model_len: int = 64,
        step_budget: StepBudget | None = None,
        share: FairShare | None = None,
        clock: Clock | None = None,
        **limits: float,
    ) -> None:
        self.clock = clock or Clock()
        self.loader = ManualLoader()
        self.bank = RecordingBank()
        self.pool = BlockPool(num_blocks, 4)
        self.residency = Residency(SlotTable(num_slots), self.loader, self.bank, max_host=max_host, clock=self.clock)
        waits = {"queue_timeout_s": 60.0, "adapter_load_timeout_s": 30.0, **limits}
        self.limits = Limits(max_num_seqs, budget, max_model_len, **waits)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.pool, self.residency, self.limits, [EOS], self.clock, step_budget, share)
        self.verdicts: list[str] = []
        self.blame = Blame(self.scheduler, self.residency.health, self.clock, self.verdicts.append)

    def request(
        self,
        name: str,
        prompt: list[int] | int = 4,
        digest: str | None = None,
        max_tokens: int = 4,
        tenant: str = "",
        priority: int = 0,
        weight: float = 1,
        **params: object,
    ) -> Request:
        """Add a request; a number for a prompt is its length, and then one prompt begins as another."""
        ids = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
        sampling = SamplingParams(max_tokens, **params)  # type: ignore[arg-type]
        request = Request(name, ids, sampling, digest, tenant, priority, weight=weight)
        self.scheduler.add(request)
        return request

    def load(self, *digests: str) -> None:
        """Bring digests into host memory."""
        for digest in digests:
            self.residency.prefetch(digest)
            self.loader.finish(digest)
        self.residency.poll()

    def settle_loads(self) -> list[TokenEvent]:
        """Take in the loads that have ended, as the engine does before each step."""
        events = []
        for digest in self.residency.poll():
            error = self.residency.find_failure(digest)
            if error is not None:
                events += self.scheduler.fail_waiting(digest, error)
        return self.blame.settle(events)

    def step(
        self, token: int = 7, is_invalid: Callable[[Request, StepPlan], bool] = lambda *_: False
    ) -> tuple[StepPlan, list[TokenEvent]]:
        """One step in which every row samples `token`, or meets numbers that are not finite."""
        plan = self.scheduler.schedule()
        sampling = [row.request for row in plan.rows if row.samples]
        invalid = [request for request in sampling if is_invalid(request, plan)]
        for request in invalid:
            self.blame.suspect(request)
        sampled = {request.request_id: token for request in sampling if request not in invalid}
        result = StepResult(sampled, frozenset(request.request_id for request in invalid))
        events = self.blame.settle([*plan.ended, *self.scheduler.update(plan, result)])
        self.scheduler.check_integrity()
        return plan, events


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    """Rows of a plan as (request, start, tokens, samples)."""
    return [(row.request.request_id, row.start, row.num_tokens, row.samples) for row in plan.rows]


def code_of(event: TokenEvent) -> str | None:
    """Error code of an event."""
    return event.error.code if event.error is not None else None
