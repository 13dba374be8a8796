"""Which decoder architectures are served, as data: what sets one apart from the others, and where its config says so.

A new Llama-like architecture is a new row here, not a new file. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Family:
    """What one architecture does differently.

    A bias flag is True, False, or the key of `config.json` that decides. `window` says which layers slide: none, all
    (Mistral), or those from `max_window_layers` on (Qwen). `defaults` stand in for keys that `config.json` lacks, as in
    the architecture's own config class.
    """

    model_type: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: Literal["none", "all", "upper"] = "none"
    defaults: Mapping[str, Any] | None = None


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": Family(
        "mistral",
        window="all",
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        qkv_bias=True,
        window="upper",
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window="upper",
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
        },
    ),
}
"""Architecture, as `config.json` spells it under `architectures`, to what it does differently."""
