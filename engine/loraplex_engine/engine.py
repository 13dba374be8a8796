"""The engine: one base model, many adapters, one forward pass. `step` is the architecture; the rest prepares it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from loraplex_engine.core.request import Request
from loraplex_engine.core.step import StepPlan, StepResult
from loraplex_engine.errors import EngineError, GrammarError, RequestError, StepFailedError
from loraplex_engine.guide.guides import Guides
from loraplex_engine.kv.pool import BlockPool
from loraplex_engine.lora.packed import LoadDone, LoadFailed
from loraplex_engine.lora.padding import PaddingMeter
from loraplex_engine.lora.residency import Residency
from loraplex_engine.metrics import EngineMetrics, EngineSnapshot
from loraplex_engine.runner import ModelRunner
from loraplex_engine.scheduling.advice import Advisor, find_onset
from loraplex_engine.scheduling.blame import Blame
from loraplex_engine.scheduling.scheduler import Scheduler
from loraplex_engine.slots.table import SlotState
from loraplex_engine.wire.messages import CoreReady, TokenEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LogitSink = Callable[[int, "Tensor"], None]
"""Takes the position of the first of some tokens, and their logits, float32 [n, V]."""

_SCORE_POLL_S = 0.005
_MAX_TOLD = 64
"""Tenants that the state tells of."""
_DTYPE_TO_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
_log = logging.getLogger(__name__)


class Engine:
    """Scheduler, adapters and model runner of one process; not thread-safe, driven by one loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        residency: Residency,
        pool: BlockPool,
        runner: ModelRunner,
        metrics: EngineMetrics,
        facts: CoreReady,
        advisor: Advisor,
        guides: Guides | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.residency = residency
        self.pool = pool
        self.facts = facts
        self.metrics = metrics
        self.advisor = advisor
        self.on_new_kind: Callable[[], None] = lambda: None
        """Called before a step of a kind that has not run yet: code may have to be compiled for it."""
        # steps of the base have run before the engine is there
        self._known_kinds = {False}
        self._runner = runner
        self._guides = guides
        self._num_base_gemms = 0
        self._sinks: dict[str, LogitSink] = {}
        self._blame = Blame(scheduler, residency.health, time.monotonic, metrics.count_invalid_output)
        self._padding = PaddingMeter(facts.ops, _DTYPE_TO_ITEMSIZE.get(facts.dtype, 4), residency.facts)
        metrics.watch(self.snapshot)

    def step(self) -> list[TokenEvent]:
        """Advance every request that can run by some tokens; returns what to tell their clients."""
        started_at = time.monotonic()
        events = self._settle_waits()
        plan = self.scheduler.schedule()
        events += plan.ended
        if plan.rows:
            result = self._execute(plan)
            events += self._update(plan, result)
            self._observe_step(plan, result, time.monotonic() - started_at)
        events = self._blame.settle(events)
        self._observe_ends(events)
        self.advisor.look(plan.num_tokens)
        return events

    def inference(self) -> AbstractContextManager[None]:
        """What a loop of many steps does well to put around them."""
        return self._runner.inference()

    @property
    def has_requests(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def has_running(self) -> bool:
        """Whether the next step is sure to compute something."""
        return len(self.scheduler.running) > self.scheduler.guided.num_late

    def add(self, request: Request) -> None:
        """Queue a request; it is answered by the events of later steps.

        Raises:
            RequestError: It can never run, or its adapter lately failed to load.
        """
        if request.params.grammar is not None:
            if self._guides is None:
                raise GrammarError("This engine follows no grammars.")
            request.guide = self._guides.open(request.params, request.tenant_id)
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: str = "abort") -> TokenEvent | None:
        """End a request now; its blocks and its hold on a slot are free when this returns."""
        event = self.scheduler.abort(request_id, reason)
        if event is not None:
            self._observe_ends([event])
        return event

    def fail(self, request_id: str, error: RequestError) -> TokenEvent | None:
        """End a request now with an error, as `abort` does without one."""
        event = self.scheduler.fail(request_id, error)
        if event is not None:
            self._observe_ends([event])
        return event

    def poison(self) -> tuple[int, int]:
        """Overwrite with NaN what nobody uses, for tests: free KV blocks, whose prefixes are forgotten, EMPTY slots.

        Returns:
            How many blocks, how many slots.
        """
        block_ids = self.pool.forget_free()
        slot_ids = [i for i, slot in enumerate(self.residency.slots.slots) if slot.state is SlotState.EMPTY]
        self._runner.poison(block_ids, slot_ids)
        return len(block_ids), len(slot_ids)

    def score(self, requests: Sequence[Request]) -> list[Tensor]:
        """Logits of every prompt position of each request, through the same scheduler, batch and kernels as serving.

        Args:
            requests: with `wants_logits` set; run beside whatever else the engine has.

        Returns:
            float32 [prompt length, V] per request.

        Raises:
            EngineError: A request failed; the message says why.
        """
        scored: dict[str, list[Tensor]] = {request.request_id: [] for request in requests}
        try:
            for request in requests:
                self.begin_score(request, _collect(scored[request.request_id]))
            self._finish_scores({request.request_id for request in requests})
            return [_join(scored[request.request_id]) for request in requests]
        finally:
            for request in requests:
                self.end_score(request.request_id)

    def begin_score(self, request: Request, sink: LogitSink) -> None:
        """Queue a request, with `wants_logits` set, whose logits go to `sink`; its last event says how it ended.

        After a preemption they come once more from the first position on.

        Raises:
            RequestError: As `add`.
        """
        assert request.wants_logits
        self.add(request)
        self._sinks[request.request_id] = sink

    def end_score(self, request_id: str) -> None:
        """Forget the sink of a request; one that still waits or runs ends now."""
        self._sinks.pop(request_id, None)
        self.abort(request_id)

    def _finish_scores(self, pending: set[str]) -> None:
        while pending:
            events = [event for event in self.step() if event.request_id in pending and event.finish]
            for event in events:
                if event.error is not None:
                    raise EngineError(event.error.message)
                pending.discard(event.request_id)
            if not events and not self.has_running:
                time.sleep(_SCORE_POLL_S)

    def state(self) -> dict[str, Any]:
        """Facts of the moment for `GET /internal/state`."""
        slots = [
            {"slot": i, "state": s.state.value, "digest": s.digest, "pins": s.num_pins, "keep": s.keep}
            for i, s in enumerate(self.residency.slots.slots)
        ]
        return {
            "slots": slots,
            "slot_schedule": asdict(self.scheduler.turns.describe(self.scheduler.waiting)),
            **self.residency.health.state(),
            "host": list(self.residency.host_digests),
            "adapter_bytes": self.residency.tier_to_bytes,
            "loading": list(self.residency.loading_digests),
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "kv": {
                "num_blocks": self.pool.num_blocks,
                "num_free": self.pool.num_free,
                "block_size": self.pool.block_size,
            },
            "max_running": self.scheduler.max_running,
            "preemptions": self.scheduler.num_preemptions,
            "preempted_at": find_onset(self.scheduler.running_to_preemptions),
            "prefix_cache": {"queries": self.scheduler.num_prefix_queries, "hits": self.scheduler.num_prefix_hits},
            "slot_loads": self.residency.slots.num_loads,
            "slot_evictions": self.residency.slots.num_evictions,
            "yields": self.scheduler.num_yields,
            "tenants": [asdict(standing) for standing in self.scheduler.describe_shares()[:_MAX_TOLD]],
            "sampled_tokens": self.scheduler.num_sampled,
            "advice": self.advisor.current,
            "prefix_history": self._describe_prefixes(),
        }

    def _describe_prefixes(self) -> dict[str, Any]:
        history = self.scheduler.prefixes.history
        tenants = history.describe(_MAX_TOLD).items()
        return {
            **asdict(history.total),
            "forgotten_blocks": history.num_forgotten,
            "is_caching": self.scheduler.prefixes.is_enabled,
            "tenants": [{"tenant_id": tenant_id, **asdict(count)} for tenant_id, count in tenants],
        }

    def snapshot(self) -> EngineSnapshot:
        """The gauges and totals of the moment, for a scrape."""
        scheduler, slots, health = self.scheduler, self.residency.slots, self.residency.health
        in_slots = [slot.digest for slot in slots.slots if slot.digest is not None]
        return EngineSnapshot(
            kv_usage_ratio=self.pool.usage_ratio,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_preemptions=scheduler.num_preemptions,
            num_yields=scheduler.num_yields,
            num_sampled=scheduler.num_sampled,
            num_base_gemms=self._num_base_gemms,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            num_prompt_tokens=scheduler.prefixes.history.total.prompt_tokens,
            num_repeated_tokens=scheduler.prefixes.history.total.repeated_tokens,
            num_overcommitted=max(0, len(scheduler.turns.find_working_set()) - len(slots.slots)),
            num_forced_turns=scheduler.turns.num_forced,
            num_strikes=health.num_strikes,
            num_failed=health.num_failed,
            num_quarantined=health.num_quarantined,
            state_to_slots={state.value: sum(s.state is state for s in slots.slots) for state in SlotState},
            tier_to_adapters=self.residency.tier_to_adapters,
            tier_to_bytes=self.residency.tier_to_bytes,
            tier_to_evictions=self.residency.tier_to_evictions,
            padding_ratios={"multiply_adds": self._padding.step_ratio, "bytes": self._padding.bytes_ratio(in_slots)},
        )

    def check_integrity(self) -> None:
        """Assert that nothing held is lost and nothing lost is held; called when idle, and by tests after each act."""
        self.scheduler.check_integrity()

    def _settle_waits(self) -> list[TokenEvent]:
        """Take in finished loads and end requests whose time is over."""
        events = []
        for digest in self.residency.poll():
            error = self.residency.find_failure(digest)
            if error is not None:
                events += self.scheduler.fail_waiting(digest, error)
        return events + self.scheduler.expire() + self.scheduler.settle_guides()

    def _execute(self, plan: StepPlan) -> StepResult | None:
        """Run a plan on the device; None should it fail."""
        if (kind := plan.num_adapters > 0) not in self._known_kinds:
            self.on_new_kind()
            self._known_kinds.add(kind)
        try:
            return self._runner.execute(plan)
        except Exception:  # noqa: BLE001 - whatever it was, it hurts this step alone
            _log.exception("a step of %d rows failed; its requests end with an error", len(plan.rows))
            return None

    def _update(self, plan: StepPlan, result: StepResult | None) -> list[TokenEvent]:
        """Take in what came of a plan; if nothing did, its requests end and the engine goes on with the others."""
        if result is None:
            return self.scheduler.fail_plan(plan, StepFailedError())
        if result.logits:
            self._keep_scores(plan, result)
        if result.invalid:
            for row in plan.rows:
                if row.request.request_id in result.invalid:
                    self._blame.suspect(row.request)
        # before requests end: a dropped adapter goes with the last of them, and its facts too
        self._padding.observe_step(plan.count_adapter_rows())
        return self.scheduler.update(plan, result)

    def _keep_scores(self, plan: StepPlan, result: StepResult) -> None:
        for row in plan.rows:
            logits = result.logits.get(row.request.request_id)
            if logits is not None:
                self._sinks[row.request.request_id](row.start, logits)

    def _observe_step(self, plan: StepPlan, result: StepResult | None, seconds: float) -> None:
        self.metrics.step_s.observe(seconds)
        if result is None:
            return
        self.metrics.step_host_s.observe(seconds - result.model_s)
        self.metrics.step_tokens.observe(plan.num_tokens)
        self.metrics.step_requests.observe(len(plan.rows))
        self.metrics.step_adapters.observe(plan.num_adapters)
        self._num_base_gemms += result.num_base_gemms
        self.metrics.inter_token_s.observe_all(self.scheduler.take_token_gaps())

    def _observe_ends(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.stats is not None and event.stats.completion_tokens:
                stats = event.stats
                first_s = stats.queue_s + stats.load_s + stats.prefill_s
                self.metrics.queue_s.observe(stats.queue_s)
                self.metrics.prefill_s.observe(stats.prefill_s)
                self.metrics.ttft_s.observe(first_s)
                self.metrics.request_s.observe(first_s + stats.decode_s)


def observe_load(metrics: EngineMetrics, result: LoadDone | LoadFailed) -> None:
    """Count a load and the seconds of its stages."""
    if isinstance(result, LoadFailed):
        metrics.loads.labels("failed", result.stage).inc()
        return
    metrics.loads.labels("ok", "pack").inc()
    for stage, seconds in (("fetch", result.fetch_s), ("verify", result.verify_s), ("pack", result.pack_s)):
        metrics.load_s.labels(stage).observe(seconds)


def _collect(parts: list[Tensor]) -> LogitSink:
    """Keep all parts in order."""

    def take(start: int, logits: Tensor) -> None:
        if start == 0:
            # from the start again after a preemption
            parts.clear()
        parts.append(logits)

    return take


def _join(parts: list[Tensor]) -> Tensor:
    import torch

    return torch.cat(parts)
