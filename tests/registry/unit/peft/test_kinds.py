"""Every kind of adapter as PEFT saves it: the plan, applied to the base, computes what PEFT does; broken ones fail."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.report import Report
from loraplex_registry.peft.spec import AdapterPlan, BaseSpec, LoraModule, ModuleSpec, TensorRef

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT = [[1, 5, 6, 7, 9, 30, 5, 6, 2, 11]]
PREFIX = "base_model.model."
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
Q = {"target_modules": ["q_proj"]}


def build_model(family: str, *, tied: bool) -> Any:
    """A tiny random base in float64, its biases not zero."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, tie_word_embeddings=tied)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def describe(model: Any) -> BaseSpec:
    """The model's facts, with the hashes of its embedding and head."""
    from torch import nn

    modules: dict[str, ModuleSpec] = {}
    hashes = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            kind: Any = "head" if path == HEAD else "linear"
            is_tied = kind == "head" and model.config.tie_word_embeddings
            has_bias = module.bias is not None
            modules[path] = ModuleSpec(module.out_features, module.in_features, kind, has_bias, is_tied)
        elif isinstance(module, nn.Embedding):
            modules[path] = ModuleSpec(module.num_embeddings, module.embedding_dim, "embedding")
        elif path.endswith("norm"):
            modules[path] = ModuleSpec(len(module.weight), 1, "norm")
        if path in (EMBEDDING, HEAD):
            hashes[path] = hash_matrix(module.weight)
    spec = BaseSpec("tiny", (), "sha256:0", "sha256:0", 40, modules, architecture=type(model).__name__)
    return msgspec.structs.replace(spec, matrix_hashes=hashes)


def hash_matrix(weight: Any) -> dict[str, str]:
    import torch

    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return {
        name: hashlib.sha256(weight.detach().to(dtype).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, dtype in dtypes.items()
    }


def train(family: str, folder: Path, *, tied: bool, **fields: Any) -> tuple[Any, BaseSpec]:
    """Save a trained adapter as PEFT does; returns PEFT's model in float64 and the base's facts."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    model = build_model(family, tied=tied).float()
    base = describe(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **({"r": 2, "lora_alpha": 4} | fields)))
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in wrapped.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        wrapped.save_pretrained(folder)
        change_config(folder, base_model_name_or_path="tiny")
        loaded = PeftModel.from_pretrained(build_model(family, tied=tied).float(), folder).double().eval()
    return loaded, base


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def judge(folder: Path, base: BaseSpec) -> tuple[Report, AdapterPlan | None]:
    return check_adapter({path.name: path for path in folder.iterdir() if path.name != "README.md"}, base)


def plan_of(folder: Path, base: BaseSpec) -> AdapterPlan:
    report, plan = judge(folder, base)
    assert plan is not None, report.checks
    return plan


def failures(folder: Path, base: BaseSpec) -> set[tuple[str, str]]:
    report, plan = judge(folder, base)
    failed = {(check.name, check.subject) for check in report.checks if check.verdict == "fail"}
    assert (plan is None) == bool(failed)
    return failed


class Twin:
    """The base in float64 with a plan merged into it, by the plain formulas and nothing of PEFT."""

    def __init__(self, model: Any, plan: AdapterPlan, weights: Path) -> None:
        import torch

        self._torch = torch
        self._data = weights.read_bytes()
        self._model = model.double()
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        with torch.no_grad():
            for saved in plan.weights:
                model.get_submodule(saved.path).weight.copy_(self._read(saved.ref))
            for rows in plan.token_rows:
                model.get_submodule(rows.path).weight[list(rows.token_ids)] = self._read(rows.ref)
            trained = {bias.path: self._read(bias.ref) for bias in plan.biases}
            for path, bias in trained.items():
                model.get_submodule(path).bias.copy_(bias)
            for module in plan.modules:
                self._merge(module)

    def logits(self) -> Any:
        with self._torch.no_grad():
            return self._model(input_ids=self._torch.tensor(PROMPT)).logits

    def _merge(self, module: LoraModule) -> None:
        layer = self._model.get_submodule(module.path)
        a, b = self._read(module.a), self._read(module.b)
        if module.is_transposed:
            a, b = a.T, b.T
        delta = module.scaling * b @ a
        weight = layer.weight + (delta if isinstance(layer, self._torch.nn.Linear) else delta.T)
        if module.magnitude is not None:
            axis = 1 if isinstance(layer, self._torch.nn.Linear) else 0
            factor = self._read(module.magnitude) / weight.norm(dim=axis)
            weight = weight * (factor[:, None] if axis == 1 else factor)
        layer.weight.copy_(weight)
        if module.bias is not None:
            bias = module.scaling * self._read(module.bias)
            layer.bias = self._torch.nn.Parameter(bias if layer.bias is None else layer.bias + bias)

    def _read(self, ref: TensorRef) -> Any:
        data = np.frombuffer(self._data[ref.start : ref.stop], {"F32": "<f4", "F16": "<f2"}[ref.dtype])
        return self._torch.from_numpy(data.reshape(ref.shape).astype("f8"))


KINDS: dict[str, dict[str, Any]] = {
    "dora": {"target_modules": "all-linear", "use_dora": True, "use_rslora": True},
    "lora_bias": {"target_modules": ["q_proj", "down_proj", HEAD], "lora_bias": True},
    "bias all": Q | {"bias": "all"},
    "bias lora_only": {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"},
    "bias all, lora_bias": Q | {"bias": "all", "lora_bias": True},
    "bias all, dora": Q | {"bias": "all", "use_dora": True},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"], "rank_pattern": {"embed_tokens": 3}},
    "head": {"target_modules": ["q_proj", HEAD], "alpha_pattern": {HEAD: 9}},
    "both ends": {"target_modules": ["embed_tokens", HEAD]},
    "both ends, dora": {"target_modules": ["q_proj", "embed_tokens", HEAD], "use_dora": True},
    "embedding, tied": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "head, tied": {"target_modules": ["q_proj", HEAD], "ensure_weight_tying": True},
    "tied by expression": {"target_modules": ".*q_proj|lm_head", "ensure_weight_tying": True},
    "not tied by expression": {"target_modules": r".*q_proj|model\.embed_tokens", "ensure_weight_tying": True},
    "tied though excluded": {
        "target_modules": ["q_proj", "embed_tokens"],
        "exclude_modules": [HEAD],
        "ensure_weight_tying": True,
    },
    "tied beside layers": {
        "target_modules": ["q_proj", "embed_tokens"],
        "layers_to_transform": [1],
        "ensure_weight_tying": True,
    },
    "tied, dora": {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True, "ensure_weight_tying": True},
    "tied, patterns": {
        "target_modules": ["q_proj", HEAD],
        "ensure_weight_tying": True,
        "use_rslora": True,
        "rank_pattern": {HEAD: 3, "embed_tokens": 4},
        "alpha_pattern": {HEAD: 32},
    },
    "saved embedding": Q | {"modules_to_save": ["embed_tokens"]},
    "saved head": Q | {"modules_to_save": ["head"]},
    "saved both": Q | {"modules_to_save": [HEAD, "embed_tokens"]},
    "saved embedding, tied": Q | {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "saved head, tied": Q | {"modules_to_save": [HEAD], "ensure_weight_tying": True},
    "saved norms": Q | {"modules_to_save": ["norm"]},
    "saved norms of a kind": Q | {"modules_to_save": ["input_layernorm", "model.norm"]},
    "saved wins over target": {"target_modules": ["q_proj", HEAD], "modules_to_save": [HEAD]},
    "saved embedding, LoRA head": {"target_modules": ["q_proj", HEAD], "modules_to_save": ["embed_tokens"]},
    "tokens": Q | {"trainable_token_indices": [30, 5]},
    "tokens, tied": Q | {"trainable_token_indices": [30, 5], "ensure_weight_tying": True},
    "tokens by name": Q | {"trainable_token_indices": {"tokens": [30, 5]}},
    "tokens of the head": Q | {"trainable_token_indices": {HEAD: [30, 5]}},
    "tokens, the same": Q | {"trainable_token_indices": {"embed_tokens": [5, 30], HEAD: [5, 30]}},
    "tokens, the same by endings": Q | {"trainable_token_indices": {"embed_tokens": [5, 30], "head": [5, 30]}},
    "tokens, others": Q | {"trainable_token_indices": {HEAD: [5, 7, 9], "embed_tokens": [5, 30]}},
    "tokens and norms": Q | {"trainable_token_indices": [5], "modules_to_save": ["norm"]},
    "tokens of the head, saved embedding": Q
    | {"trainable_token_indices": {HEAD: [5]}, "modules_to_save": ["embed_tokens"]},
    "everything": {
        "target_modules": ["q_proj", "down_proj", "embed_tokens"],
        "use_dora": True,
        "bias": "all",
        "modules_to_save": [HEAD, "norm"],
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "tied"), [("Llama", True), ("Qwen2", True), ("Qwen2", False)])
def test_the_plan_computes_what_peft_computes(tmp_path: Path, kind: str, family: str, tied: bool) -> None:
    import torch

    wrapped, base = train(family, tmp_path, tied=tied, **KINDS[kind])
    report, plan = judge(tmp_path, base)
    assert plan is not None, report.checks
    twin = Twin(build_model(family, tied=tied).float(), plan, tmp_path / "adapter_model.safetensors").logits()
    with torch.no_grad():
        expected = wrapped(input_ids=torch.tensor(PROMPT)).logits
        own = build_model(family, tied=tied).float().double()(input_ids=torch.tensor(PROMPT)).logits
    assert (expected - own).abs().max() > 1e-4
    assert (twin - expected).abs().max() < 1e-8
    assert msgspec.json.decode(msgspec.json.encode(plan), type=AdapterPlan) == plan
