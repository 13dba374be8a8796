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
from safetensors.numpy import save

from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.header import MAX_HEADER_BYTES, read_header
from loraplex_registry.peft.report import Report
from loraplex_registry.peft.rewrite import drop_tensors
from loraplex_registry.peft.spec import AdapterPlan, BaseSpec, LoraModule, ModuleSpec, TensorRef

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT = [[1, 5, 6, 7, 9, 30, 5, 6, 2, 11]]
Change = Callable[[dict[str, Any]], None]

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


def train(
    family: str, folder: Path, *, tied: bool, save: dict[str, Any] | None = None, **fields: Any
) -> tuple[Any, BaseSpec]:
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
        wrapped.save_pretrained(folder, **(save or {}))
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


@pytest.mark.parametrize(("dtype", "name"), [("float16", "F16"), ("bfloat16", "BF16")])
@pytest.mark.parametrize("kind", ["dora", "bias all, lora_bias", "both ends", "saved both", "tokens", "everything"])
def test_every_kind_is_accepted_in_half_precision(tmp_path: Path, kind: str, dtype: str, name: str) -> None:
    import torch

    _, base = train("Qwen2", tmp_path, tied=False, **KINDS[kind])
    expected = plan_of(tmp_path, base)
    half = getattr(torch, dtype)
    change_tensors(tmp_path, lambda tensors: tensors.update({key: one.to(half) for key, one in tensors.items()}))
    plan = plan_of(tmp_path, base)
    assert {ref.dtype for module in plan.modules for ref in (module.a, module.b)} == {name}
    assert (plan.num_parameters, plan.dropped) == (expected.num_parameters, expected.dropped)
    assert plan.digest != expected.digest


def test_activation_stands_in_the_plan(tmp_path: Path) -> None:
    _, base = train("Qwen2", tmp_path, tied=True, **Q, alora_invocation_tokens=[5, 6])
    plan = plan_of(tmp_path, base)
    assert (plan.invocation_ids, plan.config["alora_invocation_tokens"]) == ((5, 6), [5, 6])


def test_activated_and_plain_are_two_contents(tmp_path: Path) -> None:
    _, base = train("Qwen2", tmp_path, tied=True, **Q, alora_invocation_tokens=[5, 6])
    activated = plan_of(tmp_path, base)
    change_config(tmp_path, alora_invocation_tokens=[])
    plain = plan_of(tmp_path, base)
    assert (plain.invocation_ids, plain.digest == activated.digest) == ((), False)


def test_the_report_shows_what_is_honoured(tmp_path: Path) -> None:
    _, base = train("Qwen2", tmp_path, tied=True, **KINDS["everything"])
    honoured = judge(tmp_path, base)[0].honoured
    assert {field: honoured[field] for field in ("use_dora", "bias", "modules_to_save")} == {
        "use_dora": True,
        "bias": "all",
        "modules_to_save": ["lm_head", "norm"],
    }
    assert not honoured.keys() & {"lora_bias", "trainable_token_indices", "ensure_weight_tying"}


def test_plain_lora_keeps_the_digest_that_it_had_before_these_kinds(tmp_path: Path) -> None:
    _, base = train("Llama", tmp_path, tied=False, **Q, r=4, lora_alpha=8)
    plain = plan_of(tmp_path, base)
    assert not plain.config.keys() & {"use_dora", "bias", "modules_to_save", "ensure_weight_tying"}
    off = {"use_dora": None, "bias": "none", "modules_to_save": [], "trainable_token_indices": {}, "lora_bias": False}
    change_config(tmp_path, **off, ensure_weight_tying=True)
    assert plan_of(tmp_path, base).digest == plain.digest


def test_older_spellings_mean_the_same(tmp_path: Path) -> None:
    _, base = train("Qwen2", tmp_path, tied=True, **KINDS["bias all, dora"])
    new = plan_of(tmp_path, base)
    older = {".base_layer.bias": ".bias", "lora_magnitude_vector": "lora_magnitude_vector.weight"}

    def rename(tensors: dict[str, Any]) -> None:
        for end, former in older.items():
            for name in [name for name in tensors if name.endswith(end)]:
                tensors[name.removesuffix(end) + former] = tensors.pop(name)

    change_tensors(tmp_path, rename)
    old = plan_of(tmp_path, base)
    assert [(bias.path, bias.ref.shape) for bias in old.biases] == [(bias.path, bias.ref.shape) for bias in new.biases]
    assert all(module.magnitude is not None for module in old.modules)


def test_copies_of_the_base_s_matrices_are_dropped_and_leave_the_digest_alone(tmp_path: Path) -> None:
    _, base = train("Llama", tmp_path, tied=True, **KINDS["both ends"])
    copies = (f"{PREFIX}lm_head.base_layer.weight", f"{PREFIX}model.embed_tokens.base_layer.weight")
    whole = plan_of(tmp_path, base)
    assert whole.dropped == copies
    kept = tmp_path / "kept"
    drop_tensors(tmp_path / "adapter_model.safetensors", kept, whole.dropped)
    kept.rename(tmp_path / "adapter_model.safetensors")
    plan = plan_of(tmp_path, base)
    assert (plan.digest, plan.dropped, len(plan.modules)) == (whole.digest, (), 2)


def test_a_file_that_was_written_again_has_a_header_no_longer_than_before(tmp_path: Path) -> None:
    metadata = {"note": "\u00e9" * (MAX_HEADER_BYTES // 3), "escaped": '\n\x01\x7f"\\\u2028'}
    arrays = {name: np.zeros(1, "<f4") for name in ("a", "b")}
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(save(arrays, metadata=metadata))
    drop_tensors(source, target, ["a"])
    table = read_header(target)
    assert ([ref.name for ref in table.tensors], table.metadata) == (["b"], metadata)
    assert table.size < read_header(source).size


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_is_compared_in_its_own_dtype(tmp_path: Path, tied: bool, dtype: str) -> None:
    import torch

    _, base = train("Llama", tmp_path, tied=tied, **KINDS["both ends"])
    name = f"{PREFIX}lm_head.base_layer.weight"
    change_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(getattr(torch, dtype))}))
    assert name in plan_of(tmp_path, base).dropped
    change_tensors(tmp_path, lambda tensors: tensors[name][3].mul_(2))
    assert failures(tmp_path, base) == {("base_mismatch", name)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"modules_to_save": [HEAD]}, {"lm_head.modules_to_save.weight", "lm_head.original_module.weight"}),
        ({"trainable_token_indices": [3, 5]}, {"model.embed_tokens.token_adapter.base_layer.weight"}),
    ],
)
def test_base_matrices_that_were_forced_into_the_file_are_refused_with_the_way_out(
    tmp_path: Path, tied: bool, fields: dict[str, Any], names: set[str]
) -> None:
    _, base = train("Llama", tmp_path, tied=tied, **Q, **fields, save={"save_embedding_layers": True})
    report, plan = judge(tmp_path, base)
    refused = {check.subject: check for check in report.checks if check.verdict == "fail"}
    assert plan is None
    assert refused.keys() >= {PREFIX + name for name in names}
    for name in names:
        check = refused[PREFIX + name]
        assert (check.name, "save_embedding_layers=False" in check.message) == ("unexpected_tensor", True)


def test_a_copy_of_a_base_in_fewer_bits_is_refused_with_the_way_out(tmp_path: Path) -> None:
    _, base = train("Llama", tmp_path, tied=False, **KINDS["head"])
    change_tensors(tmp_path, _double("lm_head.base_layer.weight"))
    report, _ = judge(tmp_path, base)
    assert report.first_failure is not None
    assert report.first_failure.name == "base_mismatch"
    assert "save_embedding_layers=False" in report.first_failure.message


def test_a_copy_that_nobody_can_compare_is_refused_with_the_way_out(tmp_path: Path) -> None:
    _, base = train("Llama", tmp_path, tied=True, **KINDS["embedding"])
    name = f"{PREFIX}model.embed_tokens.base_layer.weight"
    report, plan = judge(tmp_path, msgspec.structs.replace(base, matrix_hashes={}))
    assert plan is None
    assert report.first_failure is not None
    assert (report.first_failure.name, report.first_failure.subject) == ("base_mismatch", name)
    assert "pull the base again" in report.first_failure.message


def _rows(count: int) -> Change:
    name = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
    return lambda tensors: tensors.update({name: tensors[name].new_zeros((count, 16))})


def _drop(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(PREFIX + name)


def _put(name: str, *shape: int) -> Change:
    import torch

    return lambda tensors: tensors.update({PREFIX + name: torch.zeros(shape)})


def _double(name: str) -> Change:
    return lambda tensors: tensors.update({PREFIX + name: tensors[PREFIX + name] * 2})


def _fill(name: str, value: float) -> Change:
    return lambda tensors: tensors.update({PREFIX + name: tensors[PREFIX + name].fill_(value)})


Q0 = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("kind", "change", "check", "subject"),
    [
        ("dora", _drop(f"{Q0}.lora_magnitude_vector"), "missing_tensors", f"{Q0}.lora_magnitude_vector"),
        ("dora", _put(f"{Q0}.lora_magnitude_vector", 17), "shape", f"{Q0}.lora_magnitude_vector"),
        ("dora", _fill(f"{Q0}.lora_magnitude_vector", float("nan")), "non_finite", f"{Q0}.lora_magnitude_vector"),
        ("dora", _put(f"{Q0}.lora_magnitude_vector.weight", 16), "unexpected_tensor", None),
        ("both ends, dora", _put("model.embed_tokens.lora_magnitude_vector", 40), "shape", None),
        ("lora_bias", _drop(f"{Q0}.lora_B.bias"), "missing_tensors", f"{Q0}.lora_B.bias"),
        ("lora_bias", _put(f"{Q0}.lora_B.bias", 1, 16), "shape", f"{Q0}.lora_B.bias"),
        ("bias lora_only", _drop(f"{Q0}.base_layer.bias"), "missing_tensors", f"{Q0}.base_layer.bias"),
        ("bias lora_only", _put(f"{Q0}.bias", 16), "unexpected_tensor", None),
        ("bias lora_only", _put("model.layers.0.self_attn.k_proj.bias", 8), "unexpected_tensor", None),
        ("bias all", _drop("model.layers.1.self_attn.k_proj.bias"), "missing_tensors", None),
        ("bias all", _put("model.layers.0.self_attn.o_proj.bias", 16), "unexpected_tensor", None),
        ("bias all", _put("model.norm.bias", 16), "unexpected_tensor", None),
        ("embedding", _drop("model.embed_tokens.lora_embedding_A"), "unpaired_tensors", None),
        ("embedding", _put("model.embed_tokens.lora_embedding_A", 3, 42), "shape", None),
        ("embedding", _put("model.embed_tokens.lora_embedding_B", 16, 2), "rank_mismatch", None),
        ("embedding", _put("model.embed_tokens.base_layer.weight", 42, 16), "shape", None),
        ("head", _put("lm_head.lora_embedding_A", 2, 40), "unexpected_tensor", None),
        ("head", _double("lm_head.base_layer.weight"), "base_mismatch", None),
        ("head", _put("model.norm.weight", 16), "unexpected_tensor", None),
        ("head", _put(f"{Q0}.base_layer.weight", 16, 16), "unexpected_tensor", None),
        ("saved head", _drop("lm_head.weight"), "missing_tensors", "lm_head.weight"),
        ("saved head", _put("lm_head.weight", 42, 16), "shape", "lm_head.weight"),
        ("saved head", _fill("lm_head.weight", float("inf")), "non_finite", "lm_head.weight"),
        ("saved norms", _drop("model.norm.weight"), "missing_tensors", "model.norm.weight"),
        ("saved norms", _put("model.norm.weight", 16, 1), "shape", "model.norm.weight"),
        ("saved embedding, tied", _double("lm_head.weight"), "unexpected_tensor", "lm_head.weight"),
        ("saved embedding, tied", _drop("lm_head.weight"), "missing_tensors", "lm_head.weight"),
        ("embedding, tied", _double("lm_head.lora_A.weight"), "unexpected_tensor", "lm_head.lora_A.weight"),
        ("embedding, tied", _drop("lm_head.lora_A.weight"), "unpaired_tensors", "lm_head.lora_A.weight"),
        ("tied, dora", _drop("lm_head.lora_magnitude_vector"), "missing_tensors", "lm_head.lora_magnitude_vector"),
        ("tokens", _rows(3), "shape", "model.embed_tokens.token_adapter.trainable_tokens_delta"),
        ("tokens", _put("lm_head.token_adapter.trainable_tokens_delta", 2, 16), "unexpected_tensor", None),
        ("tokens of the head", _drop("lm_head.token_adapter.trainable_tokens_delta"), "missing_tensors", None),
    ],
)
def test_each_tensor_of_a_kind_must_belong_and_fit(
    tmp_path: Path, kind: str, change: Change, check: str, subject: str | None
) -> None:
    _, base = train("Qwen2", tmp_path, tied=True, **KINDS[kind])
    change_tensors(tmp_path, change)
    [(name, found)] = failures(tmp_path, base)
    assert name == check
    assert subject is None or found == PREFIX + subject


def test_a_tied_head_may_leave_its_tensors_to_the_embedding(tmp_path: Path) -> None:
    _, base = train("Llama", tmp_path, tied=True, **KINDS["head, tied"])
    whole = plan_of(tmp_path, base)
    change_tensors(tmp_path, _drop("lm_head.lora_A.weight"))
    change_tensors(tmp_path, _drop("lm_head.lora_B.weight"))
    plan = plan_of(tmp_path, base)
    assert [(module.path, module.is_transposed) for module in plan.modules] == [
        (module.path, module.is_transposed) for module in whole.modules
    ]


@pytest.mark.parametrize(
    ("kind", "fields", "check", "subject"),
    [
        ("dora", {"use_dora": False}, "unexpected_tensor", None),
        ("bias all", {"bias": "none"}, "unexpected_tensor", None),
        ("bias all", {"bias": "lora_only"}, "unexpected_tensor", None),
        ("lora_bias", {"lora_bias": False}, "unexpected_tensor", None),
        ("saved norms", {"modules_to_save": None}, "unexpected_tensor", None),
        ("saved head", {"modules_to_save": None}, "base_mismatch", None),
        ("tokens", {"trainable_token_indices": None}, "unexpected_tensor", None),
        ("tokens", {"trainable_token_indices": [5]}, "shape", None),
        ("embedding", {"target_modules": ["q_proj"]}, "unmatched_tensors", None),
        ("tokens", {"trainable_token_indices": [5, 40]}, "field_value", "trainable_token_indices"),
        ("tokens", {"trainable_token_indices": {"q_proj": [5, 6]}}, "field_value", "trainable_token_indices"),
        ("tokens", {"trainable_token_indices": {"wte": [5, 6]}}, "field_value", "trainable_token_indices"),
        ("tokens", {"trainable_token_indices": {"norm": [5, 6]}}, "field_value", "trainable_token_indices"),
        (
            "tokens",
            {"trainable_token_indices": {"embed_tokens": [5, 6], "model.embed_tokens": [7, 8]}},
            "field_value",
            "trainable_token_indices",
        ),
        ("tokens, others", {"ensure_weight_tying": True}, "field_value", "trainable_token_indices"),
        ("tokens", {"target_modules": ["q_proj", "lm_head"]}, "field_value", "trainable_token_indices"),
        ("tokens", {"target_modules": ["q_proj", "embed_tokens"]}, "field_value", "trainable_token_indices"),
        ("tokens", {"modules_to_save": ["lm_head"]}, "field_value", "trainable_token_indices"),
        ("saved head", {"modules_to_save": ["lm_head", "wte"]}, "field_unsupported", "modules_to_save"),
        ("saved head", {"modules_to_save": ["lm_head", "k_proj"]}, "field_unsupported", "modules_to_save"),
        ("saved head", {"modules_to_save": ["lm_head", "model.layers.0"]}, "field_unsupported", "modules_to_save"),
        ("saved head", {"modules_to_save": ["lm_head", "base_layer"]}, "field_unsupported", "modules_to_save"),
        (
            "saved head, tied",
            {"modules_to_save": ["head", "embed_tokens"]},
            "field_value",
            "modules_to_save",
        ),
        (
            "saved head, tied",
            {"target_modules": ["q_proj", "lm_head"]},
            "field_value",
            "modules_to_save",
        ),
        ("embedding, tied", {"exclude_modules": ["embed_tokens"]}, "field_value", "ensure_weight_tying"),
        ("embedding", {"lora_bias": True}, "field_value", "lora_bias"),
        ("embedding", {"alora_invocation_tokens": [5]}, "field_value", "alora_invocation_tokens"),
        ("dora", {"alora_invocation_tokens": [5]}, "field_value", "alora_invocation_tokens"),
        ("bias all", {"alora_invocation_tokens": [40]}, "field_value", "alora_invocation_tokens"),
    ],
)
def test_config_and_tensors_must_agree_and_combinations_have_a_meaning(
    tmp_path: Path, kind: str, fields: dict[str, Any], check: str, subject: str | None
) -> None:
    _, base = train("Qwen2", tmp_path, tied=True, **KINDS[kind])
    change_config(tmp_path, **fields)
    failed = failures(tmp_path, base)
    assert {name for name, _ in failed} == {check}
    assert subject is None or {found for _, found in failed} == {subject}


def test_invocation_tokens_must_exist(tmp_path: Path) -> None:
    _, base = train("Qwen2", tmp_path, tied=True, **Q, alora_invocation_tokens=[5, 6])
    change_config(tmp_path, alora_invocation_tokens=[5, 40])
    assert failures(tmp_path, base) == {("field_value", "alora_invocation_tokens")}


@pytest.mark.parametrize(("kind", "size"), [("saved both", 2 * 40 * 16 * 4), ("tokens", 2 * 16 * 4)])
def test_what_an_adapter_brings_whole_has_a_limit(tmp_path: Path, kind: str, size: int) -> None:
    _, base = train("Qwen2", tmp_path, tied=True, **KINDS[kind])
    plan_of(tmp_path, msgspec.structs.replace(base, max_saved_bytes=size))
    report, plan = judge(tmp_path, msgspec.structs.replace(base, max_saved_bytes=size - 1))
    assert plan is None
    assert report.first_failure is not None
    assert report.first_failure.name == "field_value"
    assert "max_saved_bytes" in report.first_failure.message
