"""Adapters as PEFT really saves them: accepted, and the plan means what PEFT computes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.spec import BaseSpec, LoraModule, ModuleSpec, TensorRef

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def build_model(family: str) -> Any:
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES, tie_word_embeddings=family == "Llama")
    return getattr(transformers, f"{family}ForCausalLM")(config)


def describe(model: Any) -> BaseSpec:
    """A BaseSpec from the modules of the model itself."""
    from torch import nn

    modules = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            kind: Any = "head" if path == "lm_head" else "linear"
            modules[path] = ModuleSpec(module.out_features, module.in_features, kind, module.bias is not None)
        elif isinstance(module, nn.Embedding):
            modules[path] = ModuleSpec(module.num_embeddings, module.embedding_dim, "embedding")
    return BaseSpec("tiny", (), "sha256:0", "sha256:0", 40, modules, architecture=type(model).__name__)


def save(model: Any, folder: Path, dtype: str, **fields: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    model.name_or_path = "/somewhere/else/tiny"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields))
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter)
        wrapped.to(getattr(torch, dtype)).save_pretrained(folder)
    return wrapped


def read(path: Path, ref: TensorRef) -> np.ndarray:
    data = path.read_bytes()[ref.start : ref.stop]
    if ref.dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(ref.shape).astype("f8")
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[ref.dtype]).reshape(ref.shape).astype("f8")


def delta(path: Path, module: LoraModule) -> np.ndarray:
    return module.scaling * read(path, module.b) @ read(path, module.a)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "v_proj"], "r": 1, "lora_alpha": 32},
        {"target_modules": None, "r": 4, "lora_alpha": 16.5},
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": r".*layers\.1\..*(q|k)_proj"},
        {
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 2, "^model.layers.1.mlp.up_proj": 5},
            "exclude_modules": ["k_proj"],
        },
        {"target_modules": ["gate_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["o_proj"], "init_lora_weights": "gaussian", "alpha_pattern": {"0.self_attn.o_proj": 3}},
    ],
)
def test_what_peft_saves_is_accepted_and_means_the_same(
    tmp_path: Path, family: str, dtype: str, fields: dict[str, Any]
) -> None:
    from peft.tuners.lora import LoraLayer

    model = build_model(family)
    base = describe(model)
    wrapped = save(model, tmp_path, dtype, **fields)
    report, plan = check_adapter({path.name: path for path in tmp_path.iterdir()}, base)
    assert plan is not None, report.checks
    weights = tmp_path / "adapter_model.safetensors"
    layers = {name: layer for name, layer in wrapped.named_modules() if isinstance(layer, LoraLayer)}
    assert {f"base_model.model.{module.path}" for module in plan.modules} == layers.keys()
    for module in plan.modules:
        layer = layers[f"base_model.model.{module.path}"].double()
        expected = layer.get_delta_weight("default").detach().numpy()
        np.testing.assert_allclose(delta(weights, module), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"target_modules": ["q_proj"], "modules_to_save": ["k_proj"]}, "field_unsupported"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}, "field_unsupported"),
        ({"target_modules": ["q_proj"], "layer_replication": [(0, 2), (1, 2)]}, "field_unsupported"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "field_unsupported"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "olora"}, "field_unsupported"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], check: str) -> None:
    model = build_model("Qwen2")
    base = describe(model)
    save(model, tmp_path, "float32", **fields)
    report, plan = check_adapter({path.name: path for path in tmp_path.iterdir()}, base)
    assert plan is None
    assert report.first_failure is not None
    assert report.first_failure.name == check
