"""Angles equal those of `transformers`, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from loraplex_engine.models.config import ModelConfig
from loraplex_engine.models.rope import build_cos_sin
from support import tiny_llama_config

_LEN = 700
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-tuned": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_angles_equal_transformers_to_the_bit(name: str, theta: float) -> None:
    raw = tiny_llama_config(head_dim=64, rope_parameters={**SCALINGS[name], "rope_theta": theta})
    del raw["rope_theta"]
    rotary = LlamaRotaryEmbedding(LlamaConfig(**raw))
    cos, sin = rotary(torch.zeros(1), torch.arange(_LEN)[None])
    ours = build_cos_sin(ModelConfig.from_hf(raw).rope, 64, _LEN, torch.float32)
    assert torch.equal(ours, torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=-1))
