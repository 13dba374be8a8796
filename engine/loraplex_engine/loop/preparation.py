"""The first part of a start, without torch, whose import takes a second: is there a base, does it fit, reserve memory.

What cannot start says so at once, and the pages of the KV pool are touched while torch is imported.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from loraplex_engine.config import EngineConfig, check_config
from loraplex_engine.errors import StartupError
from loraplex_engine.kv.reservation import Reservation
from loraplex_engine.loop.base import Base, open_base
from loraplex_engine.loop.machine import read_machine_memory, read_process_bytes
from loraplex_engine.loop.memory import (
    MemoryPlan,
    check_share,
    choose_kv_bytes,
    choose_num_blocks,
    format_size,
    plan_memory,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Preparation:
    """A base, where the engine's memory will go, and the KV pool's part of it."""

    base: Base
    plan: MemoryPlan
    memory: Reservation | None
    """None where the pool gets what is left after a step has been measured."""


def prepare(config: EngineConfig) -> Preparation:
    """Check the settings against base and machine, and begin to reserve.

    Raises:
        ConfigError: A flag is out of its range or above what the base allows.
        BaseUnavailableError: There is no base in that folder.
        BaseUnsupportedError: The base's architecture is not served.
        StartupError: The machine lacks the memory for these settings.
    """
    check_config(config)
    base = open_base(config)
    plan = plan_memory(config, base.config, base.itemsize, is_mapped=base.is_mapped)
    machine = read_machine_memory()
    if config.gpu_memory_utilization is None:
        plan = _add_kv(config, base, plan, choose_kv_bytes(config, plan, machine, 0))
    else:
        check_share(config, plan, machine, base.block_bytes(config.block_size))
    plan.check_fits(machine.free_bytes)
    return Preparation(base, plan, Reservation(plan.kv_bytes) if plan.kv_bytes else None)


def settle(config: EngineConfig, preparation: Preparation, step_bytes: int) -> MemoryPlan:
    """The plan with what a step was measured to need, and with the KV pool whatever sizes it; checked again.

    Args:
        config: settings of the engine.
        preparation: its base is loaded by now.
        step_bytes: of a step at the limits; 0: not measured.
    """
    plan = replace(preparation.plan, step_bytes=step_bytes or preparation.plan.step_bytes)
    machine, held_bytes = read_machine_memory(), plan.fixed_bytes + plan.kv_bytes
    if preparation.memory is None:
        budget = choose_kv_bytes(config, plan, machine, read_process_bytes())
        plan = _add_kv(config, preparation.base, plan, budget)
    plan.check_fits(machine.free_bytes + held_bytes)
    return plan


def check_length(config: EngineConfig, base_limit: int, kv_tokens: int) -> None:
    """Refuse a pool that a request of the length asked for would not fit into; warn where none was asked for.

    Raises:
        StartupError: The message has both figures and the flags.
    """
    if config.max_model_len > kv_tokens:
        raise StartupError(
            f"--max-model-len is {config.max_model_len}, but the KV cache holds {kv_tokens} tokens: raise "
            f"--kv-cache-memory-bytes (or --gpu-memory-utilization) or lower --max-model-len."
        )
    if base_limit > kv_tokens:
        _log.warning(
            "the KV cache holds %d tokens, so requests may have at most that many (base: %d)", kv_tokens, base_limit
        )


def _add_kv(config: EngineConfig, base: Base, plan: MemoryPlan, budget: int) -> MemoryPlan:
    block_bytes = base.block_bytes(config.block_size)
    num_blocks = choose_num_blocks(config, budget, block_bytes, base.max_model_len)
    check_length(config, base.max_model_len, num_blocks * config.block_size)
    if config.kv_cache_memory_bytes and budget - num_blocks * block_bytes >= block_bytes:
        _log.warning(
            "--kv-cache-memory-bytes asks for %s, but %d requests (--max-num-seqs) of %d tokens (--max-model-len) "
            "can use only %s: the KV cache has that size",
            format_size(budget),
            config.max_num_seqs,
            base.max_model_len,
            format_size(num_blocks * block_bytes),
        )
    return replace(plan, kv_bytes=num_blocks * block_bytes, kv_tokens=num_blocks * config.block_size)
