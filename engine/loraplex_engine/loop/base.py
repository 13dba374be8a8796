"""What the files of a base say before anything of it is read: facts, dtype, sizes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loraplex_engine.bases.folder import load_marker, load_spec
from loraplex_engine.config import EngineConfig
from loraplex_engine.errors import BaseUnavailableError, ConfigError
from loraplex_engine.models.config import ModelConfig, load_config
from loraplex_engine.models.layout import EMBEDDING
from loraplex_engine.weights.index import TensorEntry, read_index
from loraplex_registry.peft.spec import BaseSpec

_DTYPE_TO_STORED = {"bfloat16": "BF16", "float32": "F32"}
_DTYPE_TO_ITEMSIZE = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Base:
    """A base that was looked at and not yet loaded, and how it will be served."""

    folder: Path
    spec: BaseSpec
    config: ModelConfig
    index: Mapping[str, TensorEntry]
    dtype: str
    """`bfloat16` or `float32`."""
    max_model_len: int
    digest: str = ""
    """Of its files, see `bases.manifest`; empty where it was pulled before there was one."""

    @property
    def itemsize(self) -> int:
        """Bytes of one number in the dtype."""
        return _DTYPE_TO_ITEMSIZE[self.dtype]

    @property
    def is_mapped(self) -> bool:
        """Whether the embedding is served from the pages of its file, which has the dtype already."""
        return self.index[f"{EMBEDDING}.weight"].dtype == _DTYPE_TO_STORED[self.dtype]

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block over all layers, K and V."""
        model = self.config
        return 2 * model.num_layers * block_size * model.num_kv_heads * model.head_dim * self.itemsize


def open_base(config: EngineConfig) -> Base:
    """Look at the base of an engine.

    Raises:
        BaseUnavailableError: There is no such folder, or its files are not those that were pulled.
        BaseUnsupportedError: Its architecture is not served, or its files are not whole.
        ConfigError: A flag asks for more than the base has.
    """
    folder = Path(config.base)
    try:
        spec, model, index = load_spec(folder), load_config(folder), read_index(folder)
    except FileNotFoundError as error:
        raise BaseUnavailableError(f"{folder} is not a base's folder: {error.filename} is missing.") from error
    return Base(
        folder=folder,
        spec=spec,
        config=model,
        index=index,
        dtype=choose_dtype(config.dtype),
        max_model_len=choose_max_model_len(config, model.max_position_embeddings),
        digest=load_marker(folder).digest,
    )


def choose_dtype(name: str) -> str:
    """`auto` is bfloat16 where the processor computes in it, else float32."""
    if name != "auto":
        return name
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "float32"
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


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
