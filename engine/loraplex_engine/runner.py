"""Executes plans: builds the step's tensors, runs the model once, samples. Knows nothing of queues or of who asked."""

from __future__ import annotations

import functools
import math
import time
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from loraplex_engine.core.inputs import AdapterRows, StepInputs
from loraplex_engine.core.request import NO_SLOT
from loraplex_engine.core.step import PlannedRow, StepPlan, StepResult
from loraplex_engine.kv.cache import KVCache
from loraplex_engine.models.decoder import Decoder
from loraplex_engine.models.step_buffers import StepBuffers
from loraplex_engine.ops.lora.replacement import Replacements
from loraplex_engine.ops.lora.segment import Segments, build_segments
from loraplex_engine.ops.lora.table import LoraTable
from loraplex_engine.sampling.prompt_score import score_prompts
from loraplex_engine.sampling.sampler import Sampler


class ModelRunner:
    """One model with its KV tensors and adapter table."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        table: LoraTable,
        replacements: Replacements,
        block_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._model = model
        self._cache = cache
        self._table = table
        self._replacements = replacements
        self._buffers = StepBuffers(block_size)
        self._sampler = Sampler(eos_token_ids)
        self._slot_of_row: list[int] = []
        self._segments: Segments | None = None
        self._slots: tuple[int, ...] = ()

    def inference(self) -> AbstractContextManager[None]:
        """What `execute` needs around it; around many steps it costs less than around each."""
        return torch.inference_mode()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute all rows of the plan in one forward pass and sample those that reached their last token."""
        if not torch.is_inference_mode_enabled():
            with self.inference():
                return self.execute(plan)
        if plan.block_copies:
            self._cache.copy(plan.block_copies)
        slot_of_row = _slots(plan)
        inputs = self._buffers.fill(plan.rows, self._find_adapters(slot_of_row))
        gemms_before, began_at = self._model.base_gemm_calls, time.monotonic()
        hidden = self._model.forward(inputs, self._cache)
        num_gemms = self._model.base_gemm_calls - gemms_before
        if plan.is_decoding:
            result = StepResult({})
            self._sample(result, plan.rows, self._model.logits(hidden, inputs.adapters))
        else:
            result = self._read(plan, inputs, hidden, slot_of_row)
        result.num_base_gemms, result.model_s = num_gemms, time.monotonic() - began_at
        return result

    def poison(self, block_ids: list[int], slot_ids: list[int]) -> None:
        """Overwrite KV blocks with NaN and let EMPTY slots point to it, so that a stray read is seen."""
        self._cache.fill(block_ids, math.nan)
        for slot_id in slot_ids:
            self._table.poison(slot_id)

    def _judge(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, slot_of_row: list[int]) -> StepResult:
        """What the step says of prompts: which parts are finite, and how likely they are where that is asked."""
        vouched = _find_vouched(plan, hidden)
        invalid = _find_unsampled(plan) - vouched
        if not any(row.scored for row in plan.rows):
            return StepResult({}, invalid, vouched=vouched)
        compute_logits = functools.partial(self._compute_logits, inputs, hidden, slot_of_row)
        told, unscored = score_prompts(plan, compute_logits, self._model.config.vocab_size)
        return StepResult({}, invalid | unscored, prompt_logprobs=told, vouched=vouched)

    def _compute_logits(
        self, inputs: StepInputs, hidden: Tensor, slot_of_row: list[int], row_indices: list[int]
    ) -> Tensor:
        """The logits of some of the step's tokens, by what `forward` made of them."""
        if row_indices == list(range(len(slot_of_row))):
            return self._model.logits(hidden, inputs.adapters)
        adapters = self._find_adapters([slot_of_row[index] for index in row_indices])
        return self._model.logits(hidden[row_indices], adapters)

    def _find_adapters(self, slot_of_row: list[int]) -> AdapterRows | None:
        if slot_of_row != self._slot_of_row:
            # the rows of a decode step mostly are those of the step before
            self._segments, self._slot_of_row = build_segments(slot_of_row), slot_of_row
            self._slots = tuple(sorted(set(slot_of_row) - {NO_SLOT}))
        if self._segments is None:
            return None
        replacements = self._replacements if self._replacements.has_any(self._slots) else None
        return AdapterRows(self._segments, self._slots, self._table, replacements)

    def _read(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, slot_of_row: list[int]) -> StepResult:
        """Take out of a step with prompts what its rows want."""
        result = self._judge(plan, inputs, hidden, slot_of_row)
        wanted, row_indices = _wanted_rows(plan)
        if not row_indices:
            return result
        logits = self._compute_logits(inputs, hidden, slot_of_row, row_indices)
        num_sampling = sum(row.samples for row in wanted)
        self._sample(result, wanted[:num_sampling], logits[:num_sampling])
        begin = num_sampling
        for row in wanted[num_sampling:]:
            result.logits[row.request.request_id] = logits[begin : begin + row.num_tokens].float()
            begin += row.num_tokens
        return result

    def _sample(self, result: StepResult, rows: list[PlannedRow], logits: Tensor) -> None:
        samples = self._sampler.sample(logits, [row.request for row in rows])
        result.sampled, result.logprobs, result.late = samples.token_ids, samples.logprobs, samples.late
        result.invalid |= samples.invalid


def _slots(plan: StepPlan) -> list[int]:
    """Slot of each token of the step; an adapter that is invoked in the prompt acts from there on."""
    if plan.is_decoding:
        return [r.slot if start >= r.adapter_start else NO_SLOT for r, start, _, _, _ in plan.rows]
    slots: list[int] = []
    for row in plan.rows:
        num_before = min(row.num_tokens, max(0, row.request.adapter_start - row.start))
        slots += [NO_SLOT] * num_before + [row.request.slot] * (row.num_tokens - num_before)
    return slots


def _find_vouched(plan: StepPlan, hidden: Tensor) -> frozenset[str]:
    """Requests of which a part of the prompt was computed and every row of that part is finite."""
    vouched: list[str] = []
    stop = 0
    for row in plan.rows:
        start, stop = stop, stop + row.num_tokens
        if not row.samples and not row.request.wants_logits and torch.isfinite(hidden[start:stop]).all():
            vouched.append(row.request.request_id)
    return frozenset(vouched)


def _find_unsampled(plan: StepPlan) -> frozenset[str]:
    """Requests that end with this step without a token: what they wanted was their prompt."""
    return frozenset(
        row.request.request_id
        for row in plan.rows
        if not row.samples and row.stop == row.request.num_tokens and not row.request.wants_logits
    )


def _wanted_rows(plan: StepPlan) -> tuple[list[PlannedRow], list[int]]:
    """Rows whose logits are needed, those that sample first, and where those logits are among the step's tokens."""
    sampling: list[tuple[PlannedRow, int]] = []
    kept: list[tuple[PlannedRow, range]] = []
    stop = 0
    for row in plan.rows:
        start, stop = stop, stop + row.num_tokens
        if row.request.wants_logits:
            kept.append((row, range(start, stop)))
        elif row.samples:
            sampling.append((row, stop - 1))
    indices = [index for _, index in sampling] + [index for _, span in kept for index in span]
    return [row for row, _ in sampling] + [row for row, _ in kept], indices
