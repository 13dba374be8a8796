"""The engine's settings: parsed once by the front, handed to the core as JSON, read-only afterwards.

Flag names are those of the field (`--max-num-seqs`, ...). `build_config` fills defaults that depend on the device.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from loraplex_engine.errors import ConfigError
from loraplex_registry.peft.spec import MAX_LORA_RANK

TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "mistral_named", "granite")
"""How tool calls may be written; what each is: `server/tool/format.py`."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one engine; sizes in tokens unless the name says otherwise."""

    base: str
    """Folder of the base model (with `base.json`)."""
    cache_dir: str
    """Machine-wide cache: bases, adapters, compiled ops. LORAPLEX_CACHE_DIR."""
    registry_url: str = ""
    """Where adapters come from; empty = no adapters can be loaded. LORAPLEX_REGISTRY_URL."""
    served_model_name: str = ""
    """Name of the base in the API; empty = the name in `base.json`."""
    tool_call_parser: str = "auto"
    """Form of tool calls; `auto` = what the chat template shows."""
    max_model_len: int = 0
    """Longest prompt plus answer; 0 = the base's own limit."""
    max_num_seqs: int = 16
    """Requests that run at once."""
    max_queued_requests: int = 1024
    """Requests that wait for their turn, at most."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step, at most."""
    kv_cache_memory_bytes: int = 0
    """Bytes of the KV pool; 0 = by `gpu_memory_utilization`."""
    gpu_memory_utilization: float | None = None
    """Share of the device's memory for this engine, on the CPU of the machine's or the control group's; the KV pool
    gets what weights, a step and adapters leave of it. None = a pool of min(2 GiB, 20 % of memory) on the CPU."""
    block_size: int = 16
    """Positions of one KV block."""
    enable_prefix_caching: bool = True
    """Start requests from KV blocks of a known prefix."""
    dtype: str = "auto"
    """`auto`, `bfloat16` or `float32`."""
    device: str = "auto"
    """`auto` or `cpu`."""
    max_loras: int = 8
    """Adapter slots."""
    max_cpu_loras: int = 0
    """Adapters kept in host memory; 0 = four times `max_loras`."""
    max_lora_rank: int = 64
    """Largest adapter rank that is served, at most what the kernels have forms for."""
    adapter_cache_bytes: int = 10 << 30
    """Adapter files kept on disk, in `cache_dir`; those used longest ago go first."""
    adapter_load_timeout_s: float = 60.0
    """How long a request may wait for its adapter."""
    queue_timeout_s: float = 60.0
    """How long a request may wait in the queue."""
    step_timeout_s: float = 60.0
    """How long a core, or its loader, may be silent before it counts as stuck and is started again."""
    cpu_threads: int = 0
    """Threads of the step loop; 0 = the cores this process may use."""
    has_test_hooks: bool = False
    """Open the routes below `/internal/test`; on loopback only. LORAPLEX_TEST_HOOKS."""

    @property
    def num_cpu_loras(self) -> int:
        """Adapters kept in host memory."""
        return self.max_cpu_loras or 4 * self.max_loras


def check_config(config: EngineConfig) -> EngineConfig:
    """Return the config, or raise ConfigError naming the flag and its range."""
    for name, low, high in _RANGES:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(
                f"--{name.removesuffix('_s').replace('_', '-')} is {value}, but must be from {low} to {high}."
            )
    if config.gpu_memory_utilization is not None and config.kv_cache_memory_bytes:
        raise ConfigError(
            "--gpu-memory-utilization and --kv-cache-memory-bytes both size the KV cache: give one of them."
        )
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens is {config.max_num_batched_tokens}, but must be at least --max-num-seqs "
            f"({config.max_num_seqs}), so that every running request gets its next token."
        )
    if config.max_cpu_loras and config.max_cpu_loras < config.max_loras:
        raise ConfigError(
            f"--max-cpu-loras is {config.max_cpu_loras}, but must be at least --max-loras ({config.max_loras})."
        )
    if config.dtype not in ("auto", "bfloat16", "float32"):
        raise ConfigError(f"--dtype is {config.dtype!r}, but must be auto, bfloat16 or float32.")
    if config.tool_call_parser not in TOOL_CALL_PARSERS:
        raise ConfigError(
            f"--tool-call-parser is {config.tool_call_parser!r}, but must be one of {', '.join(TOOL_CALL_PARSERS)}."
        )
    if config.device not in ("auto", "cpu"):
        raise ConfigError(f"--device is {config.device!r}; this version serves on the CPU only (auto or cpu).")
    return config


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_model_len", 0, 1 << 20),
    ("max_num_seqs", 1, 1024),
    ("max_queued_requests", 1, 1 << 20),
    ("max_num_batched_tokens", 1, 1 << 20),
    ("kv_cache_memory_bytes", 0, 1 << 50),
    ("gpu_memory_utilization", 0.01, 1.0),
    ("block_size", 1, 256),
    ("max_loras", 1, 1024),
    ("max_cpu_loras", 0, 1 << 20),
    ("max_lora_rank", 1, MAX_LORA_RANK),
    ("adapter_cache_bytes", 1 << 20, 1 << 50),
    ("adapter_load_timeout_s", 0.1, 3600),
    ("queue_timeout_s", 0.1, 3600),
    ("step_timeout_s", 5, 3600),
    ("cpu_threads", 0, 1024),
)


def available_cpus() -> int:
    """Cores this process may use: affinity, bounded by the cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


class CoreLaunch(msgspec.Struct, frozen=True):
    """What the front hands to the core on its standard input, as one JSON document, when it starts it."""

    config: EngineConfig
    to_core: str
    """zmq endpoint bound by the front; the core connects a PULL socket."""
    to_front: str
    """zmq endpoint bound by the front; the core connects a PUSH socket."""
    engine_key: str = ""
    """Key for the registry's artifacts; never in arguments or environment listings."""
