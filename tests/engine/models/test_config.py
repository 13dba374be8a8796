"""Facts read from `config.json`: what is honoured, what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex_engine.errors import BaseUnsupportedError
from loraplex_engine.models.config import ModelConfig
from loraplex_engine.models.layout import build_modules, check_tensors, expected_tensors
from support import tiny_llama_config, tiny_qwen2_config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"architectures": ["MixtralForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mystery": 1}}, "mystery"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "72"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BaseUnsupportedError, match=named):
        ModelConfig.from_hf({**tiny_llama_config(), **changes})


def test_a_refusal_lists_all_that_is_served() -> None:
    with pytest.raises(BaseUnsupportedError) as refused:
        ModelConfig.from_hf({**tiny_llama_config(), "architectures": ["FalconForCausalLM"]})
    assert str(refused.value) == (
        "The architecture FalconForCausalLM is not served; served are LlamaForCausalLM, MistralForCausalLM, "
        "Qwen2ForCausalLM, Qwen3ForCausalLM."
    )


def test_head_dim_is_derived_where_the_config_does_not_say() -> None:
    config = ModelConfig.from_hf({**tiny_llama_config(), "head_dim": None})
    assert config.head_dim == 72 // 6


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    old = tiny_llama_config(rope_theta=50000.0, rope_scaling=scaling)
    new = {**tiny_llama_config(), "rope_parameters": {**scaling, "rope_theta": 50000.0}}
    del new["rope_theta"]
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": None}, (None, None)),
        ({"sliding_window": 8}, (8, 8)),
        ({"sliding_window": 512}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_mistral_slides_only_where_the_window_can_be_passed(changes: dict[str, Any], windows: tuple[Any, ...]) -> None:
    config = {**tiny_llama_config(), "architectures": ["MistralForCausalLM"], **changes}
    assert ModelConfig.from_hf(config).windows == windows


def test_qwen_slides_from_max_window_layers_on_and_only_if_told() -> None:
    config = tiny_qwen2_config(sliding_window=8, max_window_layers=1)
    assert ModelConfig.from_hf(config).windows == (None, None)
    assert ModelConfig.from_hf({**config, "use_sliding_window": True}).windows == (None, 8)


def test_end_tokens_of_the_generation_config_win() -> None:
    config = tiny_llama_config(eos_token_id=2)
    assert ModelConfig.from_hf(config).eos_token_ids == (2,)
    assert ModelConfig.from_hf(config, {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    assert ModelConfig.from_hf({**config, "eos_token_id": None}).eos_token_ids == ()


def test_modules_tell_kinds_biases_and_the_tied_head() -> None:
    modules = build_modules(ModelConfig.from_hf(tiny_qwen2_config(tie_word_embeddings=True)))
    assert modules["model.layers.0.self_attn.q_proj"].has_bias
    assert not modules["model.layers.0.self_attn.o_proj"].has_bias
    assert (modules["model.embed_tokens"].kind, modules["model.embed_tokens"].out_features) == ("embedding", 347)
    assert (modules["lm_head"].kind, modules["lm_head"].tied) == ("head", True)
    assert modules["model.norm"].kind == "norm"


def test_tensors_that_do_not_fit_the_config_are_refused_by_name() -> None:
    config = ModelConfig.from_hf(tiny_llama_config())
    shapes = expected_tensors(config)
    check_tensors(config, shapes.items())
    check_tensors(config, {**shapes, "model.layers.0.self_attn.rotary_emb.inv_freq": (10,)}.items())
    bad = {
        "lack the tensor lm_head.weight": {name: shape for name, shape in shapes.items() if name != "lm_head.weight"},
        r"model.norm.weight is \[7\]": {**shapes, "model.norm.weight": (7,)},
        "does not use: model.layers.0.self_attn.q_proj.bias": {
            **shapes,
            "model.layers.0.self_attn.q_proj.bias": (120,),
        },
    }
    for message, found in bad.items():
        with pytest.raises(BaseUnsupportedError, match=message):
            check_tensors(config, found.items())


def test_a_tied_base_may_carry_the_head_twice() -> None:
    config = ModelConfig.from_hf(tiny_llama_config(tie_word_embeddings=True))
    check_tensors(config, {**expected_tensors(config), "lm_head.weight": (331, 72)}.items())
