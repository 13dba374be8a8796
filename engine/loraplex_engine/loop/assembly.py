"""Builds an engine from its settings: the one place where the parts of the core are put together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from loraplex_engine.bases.folder import load_spec
from loraplex_engine.config import EngineConfig, available_cpus, check_config
from loraplex_engine.engine import Engine, observe_load
from loraplex_engine.errors import StartupError
from loraplex_engine.kv.pool import BlockPool
from loraplex_engine.kv.reservation import Reservation
from loraplex_engine.loop.base import Base, LoadedModel, load_model, open_base
from loraplex_engine.loop.calibration import calibrate_runner
from loraplex_engine.loop.hooks import TOLERATED, Hooks
from loraplex_engine.loop.machine import read_machine_memory, read_process_bytes
from loraplex_engine.loop.memory import MemoryPlan, choose_kv_bytes, choose_num_blocks, plan_memory
from loraplex_engine.loop.profile import StepProfile, count_blocks, limit_rows, profile_step
from loraplex_engine.lora.bank import DeviceBank
from loraplex_engine.lora.disk import AdapterDisk
from loraplex_engine.lora.loader import LoaderProcess
from loraplex_engine.lora.residency import Loader, Residency
from loraplex_engine.metrics import EngineMetrics
from loraplex_engine.models.decoder import LINEARS_PER_LAYER, lora_shapes
from loraplex_engine.ops.lora.replacement import Replacements
from loraplex_engine.ops.lora.table import LoraTable
from loraplex_engine.runner import ModelRunner
from loraplex_engine.scheduling.advice import Advisor, EngineLoad
from loraplex_engine.scheduling.budget import StepBudget
from loraplex_engine.scheduling.limits import Limits
from loraplex_engine.scheduling.load import LoadReader
from loraplex_engine.scheduling.scheduler import Scheduler
from loraplex_engine.slots.table import SlotTable
from loraplex_engine.wire.messages import CoreReady
from loraplex_registry.peft.spec import BaseSpec

_PATIENCE = 4
"""A step at the limits should take at most this part of the time after which a step counts as stuck."""
_log = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    build_loader: Callable[[BaseSpec, str], Loader],
    on_progress: Callable[[str], None] = lambda _: None,
) -> Engine:
    """Load the base, reserve the KV pool and the slots, and join the parts.

    Args:
        config: settings of the engine; `base` is the folder of a pulled base.
        build_loader: called with the base's spec and the dtype's name; makes what brings adapters into host memory.
        on_progress: told the name of each stage as it begins, and at the end where the memory went.

    Raises:
        ConfigError: A flag is out of its range or above what the base allows.
        BaseUnavailableError: There is no base in that folder.
        BaseUnsupportedError: The base's architecture is not served.
        StartupError: The machine lacks the memory for these settings.
    """
    check_config(config)
    torch.set_num_threads(config.cpu_threads or available_cpus())
    base = open_base(config)
    plan = _foresee(config, base)
    # its pages are touched while the weights are read
    memory = Reservation(plan.kv_bytes) if plan.kv_bytes else None
    model = load_model(base, on_progress)
    table = LoraTable(
        config.max_loras, base.config.num_layers, lora_shapes(base.config), config.max_lora_rank, base.dtype
    )
    replacements = Replacements(config.max_loras)

    def build_runner(num_blocks: int, memory: Reservation | None = None) -> ModelRunner:
        cache = base.build_kv_cache(num_blocks, config.block_size, memory)
        return ModelRunner(model.decoder, cache, table, replacements, config.block_size, base.config.eos_token_ids)

    if memory is not None:
        on_progress("waiting for the memory of the KV cache")
        memory.wait()
    on_progress("computing a step at the limits")
    plan = _settle(config, base, plan, _profile(config, base, build_runner))
    num_blocks = plan.kv_tokens // config.block_size
    runner = build_runner(num_blocks, memory)
    for line in plan.to_lines(read_process_bytes()):
        on_progress(line)
    facts = _describe(config, base, model, plan)
    budget = StepBudget(calibrate_runner(runner, facts.num_blocks, facts.block_size, facts.max_model_len))
    loader = build_loader(base.spec, base.dtype_name)
    return _join(config, facts, runner, DeviceBank(table, replacements), loader, budget)


def _foresee(config: EngineConfig, base: Base) -> MemoryPlan:
    """What the engine will need: the KV pool too, unless its size depends on what is left after a measured step."""
    plan = plan_memory(config, base.config, base.dtype.itemsize, is_mapped=base.is_mapped)
    machine = read_machine_memory()
    if config.gpu_memory_utilization is None:
        plan = _add_kv(config, base, plan, choose_kv_bytes(config, plan, machine, 0))
    plan.check_fits(machine.free_bytes)
    return plan


def _settle(config: EngineConfig, base: Base, plan: MemoryPlan, profile: StepProfile) -> MemoryPlan:
    """The plan with what a step really needs, and the KV pool whatever sizes it; checked again."""
    if profile.seconds * _PATIENCE > config.step_timeout_s:
        _log.warning(
            "a step of %d tokens takes %.1f s, and a core that is silent for %.0f s is started again: "
            "lower --max-num-batched-tokens or raise --step-timeout",
            config.max_num_batched_tokens,
            profile.seconds,
            config.step_timeout_s,
        )
    plan = replace(plan, step_bytes=profile.num_bytes or plan.step_bytes)
    machine, held_bytes = read_machine_memory(), plan.fixed_bytes + plan.kv_bytes
    if config.gpu_memory_utilization is not None:
        plan = _add_kv(config, base, plan, choose_kv_bytes(config, plan, machine, read_process_bytes()))
    plan.check_fits(machine.free_bytes + held_bytes)
    return plan


def _add_kv(config: EngineConfig, base: Base, plan: MemoryPlan, budget: int) -> MemoryPlan:
    block_bytes = base.block_bytes(config.block_size)
    num_blocks = choose_num_blocks(config, budget, block_bytes, base.max_model_len)
    return replace(plan, kv_bytes=num_blocks * block_bytes, kv_tokens=num_blocks * config.block_size)


def _profile(config: EngineConfig, base: Base, build_runner: Callable[[int], ModelRunner]) -> StepProfile:
    rows = limit_rows(config, base.max_model_len)
    runner = build_runner(count_blocks(rows, config.block_size))
    return profile_step(runner.execute, rows, config.block_size)


def _describe(config: EngineConfig, base: Base, model: LoadedModel, plan: MemoryPlan) -> CoreReady:
    return CoreReady(
        name=config.served_model_name or base.spec.name,
        fingerprint=base.spec.fingerprint,
        weights_digest=base.spec.weights_digest,
        max_model_len=fit_max_model_len(config, base.max_model_len, plan.kv_tokens),
        vocab_size=base.config.vocab_size,
        eos_token_ids=list(base.config.eos_token_ids),
        num_layers=base.config.num_layers,
        linears_per_layer=LINEARS_PER_LAYER,
        dtype=base.dtype_name,
        device="cpu",
        row_invariant=model.is_row_invariant,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        num_blocks=plan.kv_tokens // config.block_size,
        block_size=config.block_size,
        ops=model.ops.form,
        ops_reason=model.ops.reason,
        memory=asdict(plan),
    )


def fit_max_model_len(config: EngineConfig, wanted: int, capacity: int) -> int:
    """The longest request that both the base and the KV pool can hold.

    Args:
        config: settings of the engine.
        wanted: the base's limit, or the flag's.
        capacity: tokens that the pool holds.

    Raises:
        StartupError: The flag asks for more than the pool holds.
    """
    if config.max_model_len > capacity:
        raise StartupError(
            f"--max-model-len is {config.max_model_len}, but the KV cache holds {capacity} tokens: raise "
            f"--kv-cache-memory-bytes or lower --max-model-len."
        )
    if wanted > capacity:
        _log.warning(
            "the KV cache holds %d tokens, so requests may have at most that many (base: %d)", capacity, wanted
        )
    return min(wanted, capacity)


def build_loader_process(config: EngineConfig, engine_key: str) -> Callable[[BaseSpec, str], LoaderProcess]:
    """How a serving core makes its loader: a helper process with the registry's address and key."""

    def build(spec: BaseSpec, dtype_name: str) -> LoaderProcess:
        return LoaderProcess(
            cache_dir=config.cache_dir,
            base=_limit_rank(spec, config),
            base_dir=config.base,
            max_disk_bytes=config.adapter_cache_bytes,
            dtype=dtype_name,
            tolerated=TOLERATED if config.has_test_hooks else (),
            registry_url=config.registry_url,
            engine_key=engine_key,
        )

    return build


def build_hooks(config: EngineConfig, engine: Engine) -> Hooks | None:
    """The test hooks of a core, None unless LORAPLEX_TEST_HOOKS asks for them."""
    if not config.has_test_hooks:
        return None
    base = _limit_rank(load_spec(Path(config.base)), config)
    return Hooks(engine, AdapterDisk(Path(config.cache_dir) / "adapters", base, None, tolerated=TOLERATED))


def _limit_rank(spec: BaseSpec, config: EngineConfig) -> BaseSpec:
    """The base as this engine serves it: the folder knows the weights, the flag the limit."""
    return msgspec.structs.replace(spec, max_lora_rank=config.max_lora_rank)


def _join(
    config: EngineConfig,
    facts: CoreReady,
    runner: ModelRunner,
    bank: DeviceBank,
    loader: Loader,
    budget: StepBudget,
) -> Engine:
    metrics = EngineMetrics()
    pool = BlockPool(facts.num_blocks, facts.block_size)
    residency = Residency(
        SlotTable(config.max_loras),
        loader,
        bank,
        max_host=config.num_cpu_loras,
        clock=time.monotonic,
        on_loaded=partial(observe_load, metrics),
    )
    limits = Limits(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        facts.max_model_len,
        config.queue_timeout_s,
        config.adapter_load_timeout_s,
        config.enable_prefix_caching,
    )
    scheduler = Scheduler(pool, residency, limits, facts.eos_token_ids, time.monotonic, budget)
    flags = EngineLoad(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        max_loras=config.max_loras,
        cpu_threads=torch.get_num_threads(),
        kv_cache_bytes=facts.memory["kv_bytes"],
    )
    advisor = Advisor(LoadReader(scheduler, pool, budget.cost, flags))
    return Engine(scheduler, residency, pool, runner, metrics, facts, advisor)
