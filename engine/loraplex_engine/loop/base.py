"""The base of an engine: first its facts, which decide what memory is needed, then its weights.

Knows neither requests nor adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from loraplex_engine.bases.folder import load_spec
from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import BaseUnavailableError, ConfigError
from loraplex_engine.kv.cache import KVCache, block_bytes, build_kv_cache
from loraplex_engine.kv.reservation import Reservation
from loraplex_engine.models.config import ModelConfig, load_config
from loraplex_engine.models.decoder import Decoder
from loraplex_engine.models.layout import EMBEDDING
from loraplex_engine.ops.linear import probe_row_invariance
from loraplex_engine.ops.native.build import NativeStatus, native_status
from loraplex_engine.weights.source import WeightSource
from loraplex_registry.peft.spec import BaseSpec


@dataclass(frozen=True, slots=True)
class Base:
    """A base whose files were opened and not yet read."""

    spec: BaseSpec
    config: ModelConfig
    weights: WeightSource
    dtype: torch.dtype
    max_model_len: int

    @property
    def dtype_name(self) -> str:
        """As `--dtype` spells it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_mapped(self) -> bool:
        """Whether the embedding is served from the pages of its file, which has the dtype already."""
        return self.weights.get(f"{EMBEDDING}.weight").dtype is self.dtype

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block."""
        model = self.config
        return block_bytes(model.num_layers, block_size, model.num_kv_heads, model.head_dim, self.dtype)

    def build_kv_cache(self, num_blocks: int, block_size: int, memory: Reservation | None) -> KVCache:
        """A KV pool of this base; see `kv.cache`."""
        model = self.config
        return build_kv_cache(
            model.num_layers, num_blocks, block_size, model.num_kv_heads, model.head_dim, self.dtype, memory
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A base's weights in memory, and what was found out about how this machine computes with them."""

    decoder: Decoder
    is_row_invariant: bool
    ops: NativeStatus


def open_base(config: EngineConfig) -> Base:
    """Read what the base's files say of themselves.

    Raises:
        BaseUnavailableError: There is no such folder, or it is no base's.
        BaseUnsupportedError: Its architecture is not served, or its files are not whole.
        ConfigError: A flag asks for more than the base has.
    """
    folder = Path(config.base)
    try:
        spec, model, weights = load_spec(folder), load_config(folder), WeightSource(folder)
    except FileNotFoundError as error:
        raise BaseUnavailableError(f"{folder} is not a base's folder: {error.filename} is missing.") from error
    dtype = choose_dtype(config.dtype)
    return Base(
        spec=spec,
        config=model,
        weights=weights,
        dtype=dtype,
        max_model_len=choose_max_model_len(config, model.max_position_embeddings),
    )


def load_model(base: Base, on_progress: Callable[[str], None]) -> LoadedModel:
    """Pack the weights and try what they are computed with."""
    on_progress("preparing the native ops (built once per machine)")
    ops = native_status()
    on_progress("reading weights")
    decoder = Decoder(base.config, base.weights, base.dtype, "cpu", base.max_model_len)
    on_progress("checking that rows do not depend on their company")
    return LoadedModel(decoder, probe_row_invariance(decoder.linears), ops)


def choose_dtype(name: str) -> torch.dtype:
    """`auto` is bfloat16 where the processor computes in it, else float32."""
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return torch.float32
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


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
