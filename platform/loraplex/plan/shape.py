"""The sizes of a Llama-like decoder, read from its `config.json`: what it weighs, and what a token keeps in the cache.

Pure; the engine counts the same from its own reading of the config, and a test holds both together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from loraplex.errors import InvalidRequestError

LAYER_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OUTER_MODULES = ("embed_tokens", "lm_head")
_MAX_SIZE = 1 << 24


class Family(msgspec.Struct, frozen=True):
    """What an architecture adds to the plain decoder; a bias is True, False, or the config's key that decides."""

    model_type: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    has_qk_norm: bool = False
    defaults: dict[str, int] = {}


FAMILIES = {
    "LlamaForCausalLM": Family(
        "llama",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": Family("mistral", defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8}),
    "Qwen2ForCausalLM": Family(
        "qwen2", qkv_bias=True, defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32}
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    ),
}
"""By the name under `architectures` in `config.json`."""


class ModelShape(msgspec.Struct, frozen=True):
    """What decides a decoder's bytes; sizes in features, lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def module_to_features(self) -> dict[str, tuple[int, int]]:
        """Input and output features of what an adapter can be trained on; the first seven are there in each layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        layer = {
            "q_proj": (hidden, self.q_size),
            "k_proj": (hidden, self.kv_size),
            "v_proj": (hidden, self.kv_size),
            "o_proj": (self.q_size, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }
        return layer | {"embed_tokens": (self.vocab_size, hidden), "lm_head": (hidden, self.vocab_size)}

    @property
    def layer_parameters(self) -> int:
        """Values of one layer: linears, their biases, norms."""
        features = self.module_to_features
        linears = sum(rows * columns for rows, columns in (features[name] for name in LAYER_MODULES))
        biases = self.has_qkv_bias * (self.q_size + 2 * self.kv_size) + self.has_o_bias * self.hidden_size
        biases += self.has_mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        norms = 2 * self.hidden_size + self.has_qk_norm * 2 * self.head_dim
        return linears + biases + norms

    @property
    def num_parameters(self) -> int:
        """Values of the whole model; a tied head has none of its own."""
        matrices = 1 if self.is_tied else 2
        return (
            matrices * self.vocab_size * self.hidden_size + self.num_layers * self.layer_parameters + self.hidden_size
        )

    @property
    def kv_values(self) -> int:
        """Values that one token keeps in the KV cache: K and V of each layer."""
        return 2 * self.num_layers * self.kv_size


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a `config.json` describes.

    Raises:
        InvalidRequestError: Another architecture, weights that are quantised, or a size that is missing or impossible.
    """
    architecture, family = _find_family(config)
    given = family.defaults | {key: value for key, value in config.items() if value is not None}
    if given.get("quantization_config"):
        raise InvalidRequestError("The config is of quantised weights; use that of the float model.", param="config")
    num_heads = _read_size(given, "num_attention_heads")
    hidden_size = _read_size(given, "hidden_size")
    shape = ModelShape(
        architecture=architecture,
        vocab_size=_read_size(given, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_read_size(given, "intermediate_size"),
        num_layers=_read_size(given, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_read_size({"num_key_value_heads": num_heads, **given}, "num_key_value_heads"),
        head_dim=_read_size({"head_dim": hidden_size // num_heads, **given}, "head_dim"),
        max_position_embeddings=_read_size(given, "max_position_embeddings"),
        is_tied=bool(given.get("tie_word_embeddings", False)),
        has_qkv_bias=_read_flag(given, family.qkv_bias),
        has_o_bias=_read_flag(given, family.o_bias),
        has_mlp_bias=_read_flag(given, family.mlp_bias),
        has_qk_norm=family.has_qk_norm,
    )
    if shape.num_heads % shape.num_kv_heads:
        raise InvalidRequestError(
            f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({shape.num_kv_heads}).",
            param="config",
        )
    return shape


def _find_family(config: Mapping[str, Any]) -> tuple[str, Family]:
    given = config.get("architectures")
    named = [str(name) for name in given] if isinstance(given, list) else []
    for architecture, family in FAMILIES.items():
        if architecture in named or (not named and family.model_type == config.get("model_type")):
            return architecture, family
    what = ", ".join(named) or str(config.get("model_type") or "without a name")
    raise InvalidRequestError(
        f"The architecture {what} cannot be planned; it can be {', '.join(FAMILIES)}.", param="config"
    )


def _read_size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIZE:
        raise InvalidRequestError(
            f"The config has {key} = {value!r}, but it must be a whole number from 1 to {_MAX_SIZE:,}.", param="config"
        )
    return value


def _read_flag(config: Mapping[str, Any], flag: bool | str) -> bool:
    return bool(config.get(flag, False)) if isinstance(flag, str) else flag
