"""Executes plans: builds the step's tensors, runs the model once, samples. Knows nothing of queues or of who asked."""

from __future__ import annotations

import itertools
import math
import time
from array import array
from dataclasses import replace

import torch
from torch import Tensor

from loraplex_engine.core.inputs import AdapterRows, StepInputs
from loraplex_engine.core.request import NO_SLOT
from loraplex_engine.core.step import PlannedRow, StepPlan, StepResult
from loraplex_engine.kv.cache import KVCache
from loraplex_engine.models.decoder import Decoder
from loraplex_engine.ops.lora.replacement import Replacements
from loraplex_engine.ops.lora.segment import build_segments
from loraplex_engine.ops.lora.table import LoraTable
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
        self._block_size = block_size
        self._sampler = Sampler(eos_token_ids)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute all rows of the plan in one forward pass and sample those that reached their last token."""
        if plan.block_copies:
            self._cache.copy(plan.block_copies)
        slot_of_row = _slots(plan)
        inputs = self._build_inputs(plan, slot_of_row)
        wanted, row_indices = _wanted_rows(plan)
        gemms_before, began_at = self._model.base_gemm_calls, time.monotonic()
        hidden = self._model.forward(inputs, self._cache)
        result = StepResult({}, vouched=_find_vouched(plan, hidden))
        num_gemms = self._model.base_gemm_calls - gemms_before
        if row_indices:
            adapters = inputs.adapters
            if row_indices != list(range(len(slot_of_row))):
                hidden = hidden[row_indices]
                adapters = self._find_adapters([slot_of_row[index] for index in row_indices])
            result = self._read(result, wanted, self._model.logits(hidden, adapters))
        return replace(result, num_base_gemms=num_gemms, model_s=time.monotonic() - began_at)

    def poison(self, block_ids: list[int], slot_ids: list[int]) -> None:
        """Overwrite KV blocks with NaN and let EMPTY slots point to it, so that a stray read is seen."""
        self._cache.fill(block_ids, math.nan)
        for slot_id in slot_ids:
            self._table.poison(slot_id)

    def _build_inputs(self, plan: StepPlan, slot_of_row: list[int]) -> StepInputs:
        # plain lists: for the rows of a decode step they take half the time of arrays
        rows = plan.rows
        counts = [row.num_tokens for row in rows]
        positions = list(itertools.chain.from_iterable(range(row.start, row.stop) for row in rows))
        token_ids = list(itertools.chain.from_iterable(row.request.token_ids(row.start, row.stop) for row in rows))
        return StepInputs(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            cells=torch.tensor([cell for row in rows for cell in self._cells(row)], dtype=torch.int64),
            block_tables=_pad([row.request.block_ids for row in rows]),
            query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
            context_len=torch.tensor([row.stop for row in rows], dtype=torch.int32),
            adapters=self._find_adapters(slot_of_row),
        )

    def _find_adapters(self, slot_of_row: list[int]) -> AdapterRows | None:
        segments = build_segments(slot_of_row)
        if segments is None:
            return None
        slots = tuple(sorted(set(slot_of_row) - {NO_SLOT}))
        replacements = self._replacements if self._replacements.has_any(slots) else None
        return AdapterRows(segments, slots, self._table, replacements)

    def _cells(self, row: PlannedRow) -> list[int]:
        size, block_ids = self._block_size, row.request.block_ids
        return [block_ids[p // size] * size + p % size for p in range(row.start, row.stop)]

    def _read(self, result: StepResult, wanted: list[PlannedRow], logits: Tensor) -> StepResult:
        num_sampling = sum(row.samples for row in wanted)
        samples = self._sampler.sample(logits[:num_sampling], [row.request for row in wanted[:num_sampling]])
        kept: dict[str, Tensor] = {}
        for row in wanted[num_sampling:]:
            begin = num_sampling + sum(map(len, kept.values()))
            kept[row.request.request_id] = logits[begin : begin + row.num_tokens].float()
        return replace(
            result, sampled=samples.token_ids, invalid=samples.invalid, logits=kept, logprobs=samples.logprobs
        )


def _slots(plan: StepPlan) -> list[int]:
    """Slot of each token of the step; an adapter that is invoked in the prompt acts from there on."""
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


def _pad(block_ids: list[list[int]]) -> Tensor:
    """The lists as rows of int32, zeros after them; by arrays, since a tensor of lists takes four times as long."""
    width = max(map(len, block_ids))
    flat = array("i")
    for ids in block_ids:
        flat.fromlist(ids)
        flat.frombytes(bytes(flat.itemsize * (width - len(ids))))
    return torch.frombuffer(flat, dtype=torch.int32).view(len(block_ids), width)
