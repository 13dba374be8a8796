"""Models that need no config at hand: the sizes of their `config.json`, as published. Data, and a look-up."""

from __future__ import annotations

from typing import Any


def _llama(
    vocab: int, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], context: int
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "max_position_embeddings": context,
    }


_TIED = {"tie_word_embeddings": True}
_MISTRAL = {"architectures": ["MistralForCausalLM"]}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama(128256, 4096, 14336, 32, (32, 8, 128), 131072),
    "llama-3.1-70b": _llama(128256, 8192, 28672, 80, (64, 8, 128), 131072),
    "llama-3.2-1b": _llama(128256, 2048, 8192, 16, (32, 8, 64), 131072) | _TIED,
    "llama-3.2-3b": _llama(128256, 3072, 8192, 28, (24, 8, 128), 131072) | _TIED,
    "mistral-7b-v0.3": _llama(32768, 4096, 14336, 32, (32, 8, 128), 32768) | _MISTRAL,
    "qwen2.5-0.5b": _llama(151936, 896, 4864, 24, (14, 2, 64), 32768) | _QWEN2 | _TIED,
    "qwen2.5-7b": _llama(152064, 3584, 18944, 28, (28, 4, 128), 32768) | _QWEN2,
    "qwen3-0.6b": _llama(151936, 1024, 3072, 28, (16, 8, 128), 40960) | _QWEN3 | _TIED,
    "qwen3-8b": _llama(151936, 4096, 12288, 36, (32, 8, 128), 40960) | _QWEN3,
    "smollm2-135m": _llama(49152, 576, 1536, 30, (9, 3, 64), 8192) | _TIED,
    "smollm2-1.7b": _llama(49152, 2048, 8192, 24, (32, 32, 64), 8192) | _TIED,
}
"""The context is that of the instruct model."""
_ENDINGS = ("-instruct", "-it", "-chat")
_ALSO = {"meta-llama-3.1-8b": "llama-3.1-8b", "mistral-7b": "mistral-7b-v0.3", "llama-3.3-70b": "llama-3.1-70b"}


def find_preset(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return the preset's own name and its config; `name` may be a hub id, in any case, also of the instruct model."""
    last = name.rpartition("/")[2].lower()
    short = next((last.removesuffix(ending) for ending in _ENDINGS if last.endswith(ending)), last)
    for candidate in (last, short, _ALSO.get(short, "")):
        if candidate in PRESETS:
            return candidate, PRESETS[candidate]
    # an instruct model may carry its release behind the word: Mistral-7B-Instruct-v0.3
    moved = last.replace("-instruct-", "-")
    return (moved, PRESETS[moved]) if moved in PRESETS else None
