"""Builds an engine from its settings: the one place where the parts of the core are put together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from loraplex_engine.bases.folder import load_spec
from loraplex_engine.config import EngineConfig, available_cpus
from loraplex_engine.engine import Engine, observe_load
from loraplex_engine.guide.guides import Guides
from loraplex_engine.guide.vocabulary import read_vocabulary
from loraplex_engine.kv.cache import build_kv_cache
from loraplex_engine.kv.pool import BlockPool
from loraplex_engine.kv.reservation import Reservation
from loraplex_engine.loop.base import Base
from loraplex_engine.loop.calibration import calibrate_runner
from loraplex_engine.loop.hooks import TOLERATED, Hooks
from loraplex_engine.loop.machine import read_machine_memory, read_process_bytes
from loraplex_engine.loop.memory import MemoryPlan
from loraplex_engine.loop.parity import ParityCalls
from loraplex_engine.loop.preparation import Preparation, prepare, settle
from loraplex_engine.loop.profile import StepProfile, count_blocks, limit_rows, profile_step
from loraplex_engine.lora.bank import DeviceBank
from loraplex_engine.lora.disk import AdapterDisk
from loraplex_engine.lora.loader import LoaderProcess
from loraplex_engine.lora.residency import Loader, Residency
from loraplex_engine.lora.worker import WorkerLaunch
from loraplex_engine.metrics import EngineMetrics
from loraplex_engine.models.decoder import LINEARS_PER_LAYER, Decoder, lora_shapes
from loraplex_engine.ops.linear import probe_row_invariance
from loraplex_engine.ops.lora.replacement import Replacements
from loraplex_engine.ops.lora.table import LoraTable
from loraplex_engine.ops.native.build import NativeStatus, native_status
from loraplex_engine.runner import ModelRunner
from loraplex_engine.scheduling.advice import Advisor, EngineLoad
from loraplex_engine.scheduling.budget import StepBudget
from loraplex_engine.scheduling.fair import VirtualTokens
from loraplex_engine.scheduling.limits import Limits
from loraplex_engine.scheduling.load import LoadReader
from loraplex_engine.scheduling.scheduler import Scheduler
from loraplex_engine.slots.table import SlotTable
from loraplex_engine.weights.source import WeightSource
from loraplex_engine.wire.messages import CoreReady
from loraplex_registry.peft.spec import BaseSpec

_PATIENCE = 4
"""A step at the limits should take at most this part of the time after which a step counts as stuck."""
_PROFILED_LAYERS = 2
_log = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    build_loader: Callable[[BaseSpec, str], Loader],
    on_progress: Callable[[str], None] = lambda _: None,
    preparation: Preparation | None = None,
) -> Engine:
    """Load the base, measure a step, lay out the KV pool and the slots, and join the parts.

    Args:
        config: settings of the engine; `base` is the folder of a pulled base.
        build_loader: called with the base's spec and the dtype's name; makes what brings adapters into host memory.
        on_progress: told the name of each stage as it begins, and at the end where the memory went.
        preparation: of this config, where that was done before torch was there.

    Raises:
        EngineError: As `prepare`; a StartupError too if a measured step does not fit.
    """
    preparation = preparation or prepare(config)
    torch.set_num_threads(config.cpu_threads or available_cpus())
    base, model = preparation.base, preparation.base.config
    with ThreadPoolExecutor(1) as thread:
        # holds the interpreter's lock for a moment, and the weights are read without it
        vocabulary = thread.submit(read_vocabulary, base.folder, model.vocab_size, model.eos_token_ids)
        loaded = _load_model(base, on_progress)
    guides = Guides(vocabulary.result(), model.vocab_size, model.eos_token_ids)
    table = LoraTable(config.max_loras, model.num_layers, lora_shapes(model), config.max_lora_rank, loaded.dtype)
    replacements = Replacements(config.max_loras)

    def build_runner(decoder: Decoder, num_blocks: int, memory: Reservation | None = None) -> ModelRunner:
        num_layers, dtype = len(decoder.layers), decoder.dtype
        cache = build_kv_cache(
            num_layers, num_blocks, config.block_size, model.num_kv_heads, model.head_dim, dtype, memory
        )
        return ModelRunner(decoder, cache, table, replacements, config.block_size, model.eos_token_ids)

    if preparation.memory is not None:
        on_progress("waiting for the memory of the KV cache")
        preparation.memory.wait()
    on_progress("computing a step at the limits")
    plan = settle(config, preparation, _profile(config, base, loaded.decoder, build_runner).num_bytes)
    runner = build_runner(loaded.decoder, plan.kv_tokens // config.block_size, preparation.memory)
    facts = _describe(config, base, loaded, plan)
    budget = StepBudget(calibrate_runner(runner, facts.num_blocks, facts.block_size, facts.max_model_len))
    for line in plan.to_lines(read_process_bytes(), read_machine_memory()):
        on_progress(line)
    bank, loader = DeviceBank(table, replacements), build_loader(base.spec, base.dtype)
    return _join(config, facts, runner, bank, loader, budget, guides)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A base's weights in memory, and what was found out about how this machine computes with them."""

    decoder: Decoder
    dtype: torch.dtype
    is_row_invariant: bool
    ops: NativeStatus


def _load_model(base: Base, on_progress: Callable[[str], None]) -> _Loaded:
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[base.dtype]
    on_progress("preparing the native ops (built once per machine)")
    ops = native_status()
    on_progress("reading weights")
    decoder = Decoder(base.config, WeightSource(base.folder), dtype, "cpu", base.max_model_len)
    on_progress("checking that rows do not depend on their company")
    return _Loaded(decoder, dtype, probe_row_invariance(decoder.linears), ops)


def _profile(
    config: EngineConfig, base: Base, decoder: Decoder, build_runner: Callable[[Decoder, int], ModelRunner]
) -> StepProfile:
    """Run a step at the limits on a cache of its own; warn where it takes so long that the core would seem stuck.

    Layers compute one after the other in the same memory and take equally long: a few of them tell of all.
    """
    rows, short = limit_rows(config, base.max_model_len), decoder.shortened(_PROFILED_LAYERS)
    runner = build_runner(short, count_blocks(rows, config.block_size))

    def profile() -> StepProfile:
        measured = profile_step(runner.execute, rows, config.block_size)
        return replace(measured, seconds=measured.seconds * len(decoder.layers) / len(short.layers))

    first, limit_s = profile(), config.step_timeout_s / _PATIENCE
    # the first one also does what is done once
    if first.seconds > limit_s and (seconds := profile().seconds) > limit_s:
        _log.warning(
            "a step of %d tokens takes %.1f s, and a core that is silent for %.0f s is started again: "
            "lower --max-num-batched-tokens or raise --step-timeout",
            config.max_num_batched_tokens,
            seconds,
            config.step_timeout_s,
        )
    return first


def _describe(config: EngineConfig, base: Base, loaded: _Loaded, plan: MemoryPlan) -> CoreReady:
    return CoreReady(
        name=config.served_model_name or base.spec.name,
        fingerprint=base.spec.fingerprint,
        weights_digest=base.spec.weights_digest,
        digest=base.digest,
        max_model_len=min(base.max_model_len, plan.kv_tokens),
        vocab_size=base.config.vocab_size,
        eos_token_ids=list(base.config.eos_token_ids),
        num_layers=base.config.num_layers,
        linears_per_layer=LINEARS_PER_LAYER,
        dtype=base.dtype,
        device="cpu",
        row_invariant=loaded.is_row_invariant,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        num_blocks=plan.kv_tokens // config.block_size,
        block_size=config.block_size,
        ops=loaded.ops.form,
        ops_reason=loaded.ops.reason,
        memory=asdict(plan),
    )


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
            silence_s=config.step_timeout_s,
        )

    return build


def build_parity(config: EngineConfig, engine: Engine, engine_key: str) -> ParityCalls:
    """The measurements of a serving core."""
    launch = WorkerLaunch(
        config.cache_dir,
        _limit_rank(load_spec(Path(config.base)), config),
        config.base,
        engine.facts.dtype,
        config.registry_url,
        engine_key,
        config.adapter_cache_bytes,
        TOLERATED if config.has_test_hooks else (),
    )
    return ParityCalls(engine, launch, config.adapter_load_timeout_s, time.monotonic)


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
    guides: Guides,
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
        config.max_queued_requests,
    )
    share = VirtualTokens(time.monotonic)
    scheduler = Scheduler(pool, residency, limits, facts.eos_token_ids, time.monotonic, budget, share)
    flags = EngineLoad(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        max_loras=config.max_loras,
        cpu_threads=torch.get_num_threads(),
        kv_cache_bytes=facts.memory["kv_bytes"],
    )
    advisor = Advisor(LoadReader(scheduler, pool, budget.cost, flags))
    return Engine(scheduler, residency, pool, runner, metrics, facts, advisor, guides)
