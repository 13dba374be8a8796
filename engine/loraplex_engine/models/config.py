"""Architecture facts of one base, read from its `config.json`; what is not served is refused by name.

No torch: the front and `bases` read it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex_engine.errors import BaseUnsupportedError
from loraplex_engine.models.family import FAMILIES, Family
from loraplex_engine.models.rope import Rope, parse_rope

_MAX_SIZE = 1 << 24
_MAX_SHOWN = 40
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What decides the shapes and the arithmetic of a Llama-like decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    is_tied: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    windows: tuple[int | None, ...]
    """Of each layer: how many positions a token sees, itself included; None = all before it."""
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read `config.json` and, where there is one, `generation_config.json` (its end tokens win).

        Raises:
            BaseUnsupportedError: an architecture, activation, rope scaling or quantisation that is not served, or a
                missing or impossible size; the message names the key.
        """
        architecture, family = find_family(config)
        filled = _filled(config, family)
        _check_served(filled)
        num_layers = _size(filled, "num_hidden_layers")
        return cls(
            architecture=architecture,
            vocab_size=_size(filled, "vocab_size"),
            hidden_size=_size(filled, "hidden_size"),
            intermediate_size=_size(filled, "intermediate_size"),
            num_layers=num_layers,
            **_heads(filled),
            rms_norm_eps=float(filled.get("rms_norm_eps", 1e-6)),
            rope=parse_rope(filled),
            max_position_embeddings=_size(filled, "max_position_embeddings"),
            is_tied=bool(filled.get("tie_word_embeddings", False)),
            has_qkv_bias=_flag(filled, family.qkv_bias),
            has_o_bias=_flag(filled, family.o_bias),
            has_mlp_bias=_flag(filled, family.mlp_bias),
            has_qk_norm=family.qk_norm,
            windows=_windows(filled, family, num_layers),
            eos_token_ids=_eos_token_ids(filled, generation or {}),
        )


def find_family(config: Mapping[str, Any]) -> tuple[str, Family]:
    """The served architecture that `architectures` names or, where that is absent, `model_type`.

    Raises:
        BaseUnsupportedError: none; the message lists what is served.
    """
    named = list(config.get("architectures") or [])
    for architecture, family in FAMILIES.items():
        if architecture in named or (not named and family.model_type == config.get("model_type")):
            return architecture, family
    what = ", ".join(map(str, named)) or config.get("model_type") or "without a name"
    raise BaseUnsupportedError(f"The architecture {what} is not served; served are {', '.join(FAMILIES)}.")


def _filled(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    # null is not absent for sliding_window: it says that nothing slides
    given = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    return {**(family.defaults or {}), **given}


def _check_served(config: Mapping[str, Any]) -> None:
    if missing := [key for key in _REQUIRED if key not in config]:
        raise BaseUnsupportedError(f"config.json lacks {missing[0]!r}.")
    if config.get("hidden_act", "silu") != "silu":
        raise BaseUnsupportedError(f"The activation {config['hidden_act']!r} is not served; served is silu.")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise BaseUnsupportedError(f"Weights quantised by {method!r} are not served; use the float weights.")


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIZE:
        shown = repr(value)[:_MAX_SHOWN]
        raise BaseUnsupportedError(f"config.json has {key} = {shown}, but it must be a whole number from 1 on.")
    return value


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    num_heads = _size(config, "num_attention_heads")
    num_kv_heads = _size({"num_key_value_heads": num_heads, **config}, "num_key_value_heads")
    head_dim = _size({"head_dim": config["hidden_size"] // num_heads, **config}, "head_dim")
    if num_heads % num_kv_heads:
        raise BaseUnsupportedError(
            f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})."
        )
    if head_dim % 2:
        raise BaseUnsupportedError(f"head_dim is {head_dim}, but rotary embedding needs an even one.")
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def _flag(config: Mapping[str, Any], flag: bool | str) -> bool:
    return bool(config.get(flag, False)) if isinstance(flag, str) else flag


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    is_off = family.window == "none" or (family.window == "upper" and not config.get("use_sliding_window", False))
    if is_off or window is None or window >= config["max_position_embeddings"]:
        return (None,) * num_layers
    if family.window == "all":
        return (int(window),) * num_layers
    kinds = config.get("layer_types") or _layer_types(num_layers, config.get("max_window_layers", 28))
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _layer_types(num_layers: int, first_sliding: int) -> list[str]:
    return ["sliding_attention" if layer >= first_sliding else "full_attention" for layer in range(num_layers)]


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(map(int, found)) if isinstance(found, list) else (int(found),)


def load_config(folder: Path) -> ModelConfig:
    """The facts of the base in `folder`, from its `config.json` and `generation_config.json`.

    Raises:
        BaseUnsupportedError: see `ModelConfig.from_hf`; also where a file is not JSON.
    """
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.exists() else None
    config = _read_json(folder / "config.json")
    try:
        return ModelConfig.from_hf(config, generation)
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as error:
        raise BaseUnsupportedError(f"{folder / 'config.json'} has a value of a wrong type: {error}.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        # half of a character is no text, and no message could quote it
        json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise BaseUnsupportedError(f"{path} is not JSON.") from None
    except OSError as error:
        raise BaseUnsupportedError(f"{path} cannot be read: {error.strerror}.") from None
    if not isinstance(content, dict):
        raise BaseUnsupportedError(f"{path} is not a JSON object.")
    return content
