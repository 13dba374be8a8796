"""One step at the limits before the engine serves: what it needs beside weights and cache, and how long it takes.

Knows a runner and counts bytes; what to do with the figures is for others.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from loraplex_engine.config import EngineConfig
from loraplex_engine.core.request import Request
from loraplex_engine.core.step import PlannedRow, StepPlan
from loraplex_engine.loop.machine import forget_peak, read_process_bytes
from loraplex_engine.wire.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Bytes of a step at the limits at its peak (0: this system does not tell), and its seconds."""

    num_bytes: int
    seconds: float


def limit_rows(config: EngineConfig, max_model_len: int) -> list[int]:
    """Tokens of each row of a step at the limits: as many requests as run at once share what one step computes."""
    count = min(config.max_num_seqs, config.max_num_batched_tokens)
    return [min(config.max_num_batched_tokens // count, max_model_len)] * count


def profile_step(execute: Callable[[StepPlan], object], rows: list[int], block_size: int) -> StepProfile:
    """Run one step whose rows begin their prompts.

    Args:
        execute: runs a plan on a cache with the blocks that `rows` need, one row after the other.
        rows: tokens of each row.
        block_size: positions of a block.
    """
    plan = StepPlan(_plan_rows(rows, block_size))
    _trim_heap()
    before = read_process_bytes()
    forget_peak()
    started_at = time.monotonic()
    execute(plan)
    seconds = time.monotonic() - started_at
    return StepProfile(max(0, read_process_bytes("VmHWM") - before), seconds)


def count_blocks(rows: list[int], block_size: int) -> int:
    """Blocks that the rows of a profile need together."""
    return sum(-(-num_tokens // block_size) for num_tokens in rows)


def _plan_rows(rows: list[int], block_size: int) -> list[PlannedRow]:
    planned, first_block = [], 0
    for index, num_tokens in enumerate(rows):
        blocks = range(first_block, first_block + count_blocks([num_tokens], block_size))
        first_block = blocks.stop
        params = SamplingParams(max_tokens=1, temperature=0.0)
        request = Request(f"profile-{index}", [0] * num_tokens, params, block_ids=list(blocks))
        planned.append(PlannedRow(request, 0, num_tokens, samples=True))
    return planned


def _trim_heap() -> None:
    """Give back what reading the weights left behind, or the step would live on that unseen."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
