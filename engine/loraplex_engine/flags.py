"""The engine's command-line flags and their `LORAPLEX_ENGINE_*` twins, turned into an `EngineConfig`.

A flag wins over the environment. What the field knows but this engine has not built is refused in one sentence, never
ignored. Knows neither torch nor HTTP.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from loraplex_engine.config import EngineConfig, check_config
from loraplex_engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag that sets one field of the config."""

    name: str
    field: str
    parse: Callable[[str], Any]
    meaning: str


@dataclass(frozen=True, slots=True)
class Later:
    """A flag of the field that has one value today; another is refused with `reason`."""

    name: str
    only: str
    reason: str


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(KiB|MiB|GiB|TiB)|([0-9]+)")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size(text: str) -> int:
    """Bytes of `2147483648`, `2GiB` or `1.5GiB`.

    Raises:
        ConfigError: It is none of these, or no whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    num_bytes = Fraction(match[1] or match[3]) * _UNITS.get(match[2], 1) if match else Fraction(1, 2)
    if num_bytes.denominator != 1:
        raise ConfigError("must be bytes, as in 2147483648, or have KiB, MiB, GiB or TiB behind it, as in 2GiB")
    return int(num_bytes)


FLAGS = (
    Flag("max-model-len", "max_model_len", int, "longest prompt plus answer, tokens (default: the base's)"),
    Flag("max-num-seqs", "max_num_seqs", int, "requests that run at once (default: 16)"),
    Flag(
        "max-queued-requests",
        "max_queued_requests",
        int,
        "requests that wait for their turn, at most; the next one is told queue_full (default: 1024)",
    ),
    Flag(
        "max-num-batched-tokens", "max_num_batched_tokens", int, "tokens computed in one step, at most (default: 2048)"
    ),
    Flag("kv-cache-memory-bytes", "kv_cache_memory_bytes", size, "size of the KV cache, bytes or as 2GiB"),
    Flag(
        "gpu-memory-utilization",
        "gpu_memory_utilization",
        float,
        "share of the memory that the engine may use; the KV cache gets what is left of it (on the CPU the cache has "
        "at most 2 GiB unless this is given)",
    ),
    Flag("block-size", "block_size", int, "positions of one KV block (default: 16)"),
    Flag(
        "dtype", "dtype", str, "auto (bfloat16 where the processor computes in it, else float32), bfloat16 or float32"
    ),
    Flag("max-loras", "max_loras", int, "adapter slots (default: 8)"),
    Flag("max-cpu-loras", "max_cpu_loras", int, "adapters kept in host memory (default: 4 x max-loras)"),
    Flag("max-lora-rank", "max_lora_rank", int, "highest rank, at most 256 (default: 64)"),
    Flag(
        "adapter-cache-bytes",
        "adapter_cache_bytes",
        size,
        "adapter files kept on disk, bytes or as 2GiB (default: 10GiB)",
    ),
    Flag("adapter-load-timeout", "adapter_load_timeout_s", float, "longest wait for an adapter, seconds (default: 60)"),
    Flag(
        "step-timeout",
        "step_timeout_s",
        float,
        "silence after which the core, or its loader, counts as stuck, seconds (default: 60)",
    ),
    Flag("device", "device", str, "auto or cpu"),
    Flag("cpu-threads", "cpu_threads", int, "threads of the step loop (default: the cores it may use)"),
    Flag("served-model-name", "served_model_name", str, "name under which the base is served"),
    Flag(
        "tool-call-parser",
        "tool_call_parser",
        str,
        "form of tool calls: auto (what the chat template shows), hermes, llama3_json, mistral, mistral_named, granite",
    ),
)
LATER = (
    Later("seed", "0", "Each request is seeded by its own `seed`; one for the whole engine is not built yet."),
    Later("kv-cache-dtype", "auto", "The KV cache has the dtype of the model; fp8 and others are not built yet."),
    Later("quantization", "none", "Quantised weights are not built yet; a base is served in bfloat16 or float32."),
    Later("tensor-parallel-size", "1", "Splitting the base over cards is not built yet."),
    Later("attention-backend", "auto", "There is one attention kernel; choosing another is not built yet."),
)
PREFIX_CACHING = "enable-prefix-caching"
SWITCHES = (
    Later("enable-chunked-prefill", "1", "Prefill is always chunked; switching that off is not built yet."),
    Later("enforce-eager", "1", "There are no CUDA graphs yet; every step is eager."),
)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag; none has a default, so that an absent one is told from a given one."""
    for flag in FLAGS:
        parser.add_argument(f"--{flag.name}", help=flag.meaning, metavar=flag.parse.__name__.upper())
    for later in LATER:
        parser.add_argument(f"--{later.name}", help=f"only {later.only}: {later.reason}", metavar="STR")
    parser.add_argument(
        f"--{PREFIX_CACHING}",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="start from KV blocks of a known prefix (default: on)",
    )
    for switch in SWITCHES:
        parser.add_argument(f"--{switch.name}", action=argparse.BooleanOptionalAction, default=None, help=switch.reason)


def build_config(args: argparse.Namespace, settings: Mapping[str, str], base: Path, cache_dir: Path) -> EngineConfig:
    """Read flags and settings into a checked config.

    Args:
        args: Parsed by a parser with `add_engine_flags`, and `registry_url`.
        settings: `read_settings(environ, "engine")`.
        base: Folder of the base.
        cache_dir: The machine-wide cache.

    Raises:
        ConfigError: a value cannot be used; the message names the flag.
    """
    for later in (*LATER, *SWITCHES):
        _check_later(later, _find(later.name, args, settings))
    given = {flag.field: _parse(flag, text) for flag in FLAGS if (text := _find(flag.name, args, settings)) is not None}
    if (switch := _find(PREFIX_CACHING, args, settings)) is not None:
        given["enable_prefix_caching"] = _parse_switch(f"--{PREFIX_CACHING}", switch)
    given["has_test_hooks"] = _parse_switch("LORAPLEX_TEST_HOOKS", settings.get("test_hooks", "0"))
    registry_url = args.registry_url or settings.get("registry_url", "")
    return check_config(
        EngineConfig(base=str(base), cache_dir=str(cache_dir), registry_url=registry_url.rstrip("/"), **given)
    )


def _find(name: str, args: argparse.Namespace, settings: Mapping[str, str]) -> str | None:
    key = name.replace("-", "_")
    given = getattr(args, key)
    if isinstance(given, bool):
        return "1" if given else "0"
    return given if given is not None else settings.get(f"engine_{key}")


def _parse(flag: Flag, text: str) -> Any:
    try:
        return flag.parse(text)
    except ConfigError as error:
        raise ConfigError(f"--{flag.name} is {text!r}, but {error}.") from None
    except ValueError:
        raise ConfigError(f"--{flag.name} is {text!r}, but must be a number ({flag.parse.__name__}).") from None


def _parse_switch(name: str, text: str) -> bool:
    value = {"1": True, "true": True, "0": False, "false": False}.get(text.lower())
    if value is None:
        raise ConfigError(f"{name} is {text!r}, but must be 1 or 0.")
    return value


def _is_same_number(text: str, other: str) -> bool:
    try:
        return float(text) == float(other)
    except ValueError:
        return False


def _check_later(later: Later, text: str | None) -> None:
    if text is not None and text.lower() != later.only and not _is_same_number(text, later.only):
        raise ConfigError(f"--{later.name} is {text!r}: {later.reason}")
