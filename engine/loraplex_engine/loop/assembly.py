"""Builds an engine from its settings: the one place where the parts of the core are put together."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from loraplex_engine.bases.folder import load_spec
from loraplex_engine.config import EngineConfig, available_cpus, check_config
from loraplex_engine.core.request import Request
from loraplex_engine.core.step import PlannedRow, StepPlan
from loraplex_engine.engine import Engine, observe_load
from loraplex_engine.errors import ConfigError, StartupError
from loraplex_engine.kv.cache import block_bytes, build_kv_cache
from loraplex_engine.kv.pool import BlockPool
from loraplex_engine.loop.hooks import TOLERATED, Hooks
from loraplex_engine.lora.bank import DeviceBank
from loraplex_engine.lora.disk import AdapterDisk
from loraplex_engine.lora.loader import LoaderProcess
from loraplex_engine.lora.residency import Loader, Residency
from loraplex_engine.metrics import EngineMetrics
from loraplex_engine.models.config import ModelConfig, load_config
from loraplex_engine.models.decoder import LINEARS_PER_LAYER, Decoder, lora_shapes
from loraplex_engine.ops.linear import probe_row_invariance
from loraplex_engine.ops.lora.replacement import Replacements
from loraplex_engine.ops.lora.table import LoraTable
from loraplex_engine.ops.native.build import NativeStatus, native_status
from loraplex_engine.runner import ModelRunner
from loraplex_engine.scheduling.scheduler import Limits, Scheduler
from loraplex_engine.slots.table import SlotTable
from loraplex_engine.weights.source import WeightSource
from loraplex_engine.wire.messages import CoreReady, SamplingParams
from loraplex_registry.peft.spec import BaseSpec

_MAX_CPU_KV_BYTES = 2 << 30
_CPU_KV_SHARE = 0.20
_log = logging.getLogger(__name__)


def choose_dtype(name: str) -> torch.dtype:
    """`auto` is bfloat16 where the processor computes in it, else float32."""
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return torch.float32
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


def choose_num_blocks(config: EngineConfig, bytes_per_block: int, max_model_len: int) -> int:
    """Blocks of the KV pool, never more than all sequences could use.

    Raises:
        StartupError: Not one block fits.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget = config.kv_cache_memory_bytes or min(_MAX_CPU_KV_BYTES, int(available * _CPU_KV_SHARE))
    useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    num_blocks = min(budget // bytes_per_block, useful)
    if num_blocks < 1:
        raise StartupError(
            f"The KV cache has {budget} bytes, but one block needs {bytes_per_block}: raise --kv-cache-memory-bytes "
            "or lower --block-size."
        )
    return num_blocks


def build_engine(
    config: EngineConfig,
    build_loader: Callable[[BaseSpec, str], Loader],
    on_progress: Callable[[str], None] = lambda _: None,
) -> Engine:
    """Load the base, reserve the KV pool and the slots, and join the parts.

    Args:
        config: settings of the engine; `base` is the folder of a pulled base.
        build_loader: called with the base's spec and the dtype's name; makes what brings adapters into host memory.
        on_progress: told the name of each stage as it begins.

    Raises:
        ConfigError: A flag is out of its range or above what the base allows.
        BaseUnsupportedError: The base's architecture is not served.
        StartupError: The machine lacks the memory for these settings.
    """
    check_config(config)
    torch.set_num_threads(config.cpu_threads or available_cpus())
    loaded = _load_base(config, on_progress)
    on_progress("reserving the KV cache")
    num_blocks = choose_num_blocks(config, loaded.bytes_per_block(config.block_size), loaded.max_model_len)
    max_model_len = fit_max_model_len(config, loaded.max_model_len, num_blocks)
    table = LoraTable(
        config.max_loras, loaded.config.num_layers, lora_shapes(loaded.config), config.max_lora_rank, loaded.dtype
    )
    replacements = Replacements(config.max_loras)
    runner = _build_runner(config, loaded, table, replacements, num_blocks)
    on_progress("computing a first step")
    _warm_up(runner)
    loader = build_loader(loaded.spec, loaded.dtype_name)
    facts = _describe(config, loaded, num_blocks, max_model_len)
    return _join(config, facts, runner, DeviceBank(table, replacements), loader)


@dataclass(frozen=True, slots=True)
class _LoadedBase:
    """A base in memory and what was found out about it."""

    spec: BaseSpec
    config: ModelConfig
    model: Decoder
    max_model_len: int
    dtype: torch.dtype
    is_row_invariant: bool
    ops: NativeStatus

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def bytes_per_block(self, block_size: int) -> int:
        config = self.config
        return block_bytes(config.num_layers, block_size, config.num_kv_heads, config.head_dim, self.dtype)


def _load_base(config: EngineConfig, on_progress: Callable[[str], None]) -> _LoadedBase:
    folder = Path(config.base)
    spec, model_config = load_spec(folder), load_config(folder)
    max_model_len = choose_max_model_len(config, model_config.max_position_embeddings)
    dtype = choose_dtype(config.dtype)
    on_progress("preparing the native ops (built once per machine)")
    ops = native_status()
    on_progress("reading weights")
    model = Decoder(model_config, WeightSource(folder), dtype, "cpu", max_model_len)
    on_progress("checking that rows do not depend on their company")
    return _LoadedBase(spec, model_config, model, max_model_len, dtype, probe_row_invariance(model.linears), ops)


def _build_runner(
    config: EngineConfig, loaded: _LoadedBase, table: LoraTable, replacements: Replacements, num_blocks: int
) -> ModelRunner:
    model_config = loaded.config
    cache = build_kv_cache(
        model_config.num_layers,
        num_blocks,
        config.block_size,
        model_config.num_kv_heads,
        model_config.head_dim,
        loaded.dtype,
    )
    return ModelRunner(loaded.model, cache, table, replacements, config.block_size, model_config.eos_token_ids)


def _warm_up(runner: ModelRunner) -> None:
    """Touch weights and code once, so that the first request does not wait for pages; nothing of it is kept."""
    request = Request("warm-up", [0], SamplingParams(max_tokens=1, temperature=0.0), block_ids=[0])
    runner.execute(StepPlan([PlannedRow(request, 0, 1, samples=True)]))


def _describe(config: EngineConfig, loaded: _LoadedBase, num_blocks: int, max_model_len: int) -> CoreReady:
    return CoreReady(
        name=config.served_model_name or loaded.spec.name,
        fingerprint=loaded.spec.fingerprint,
        weights_digest=loaded.spec.weights_digest,
        max_model_len=max_model_len,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=list(loaded.config.eos_token_ids),
        num_layers=loaded.config.num_layers,
        linears_per_layer=LINEARS_PER_LAYER,
        dtype=loaded.dtype_name,
        device="cpu",
        row_invariant=loaded.is_row_invariant,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        num_blocks=num_blocks,
        block_size=config.block_size,
        ops=loaded.ops.form,
        ops_reason=loaded.ops.reason,
    )


def choose_max_model_len(config: EngineConfig, base_limit: int) -> int:
    """The base's own limit unless the flag asks for less.

    Raises:
        ConfigError: The flag asks for more than the base was trained for.
    """
    if config.max_model_len > base_limit:
        raise ConfigError(
            f"--max-model-len is {config.max_model_len}, but this base serves at most {base_limit} tokens."
        )
    return config.max_model_len or base_limit


def fit_max_model_len(config: EngineConfig, wanted: int, num_blocks: int) -> int:
    """The longest request that both the base and the KV pool can hold.

    Raises:
        StartupError: The flag asks for more than the pool holds.
    """
    capacity = num_blocks * config.block_size
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


def _join(config: EngineConfig, facts: CoreReady, runner: ModelRunner, bank: DeviceBank, loader: Loader) -> Engine:
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
    scheduler = Scheduler(pool, residency, limits, facts.eos_token_ids, time.monotonic)
    return Engine(scheduler, residency, pool, runner, metrics, facts)
