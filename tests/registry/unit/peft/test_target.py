"""Targets, ranks and scalings against PEFT itself."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from examples import examples
from loraplex_registry.peft.config import LoraSettings
from loraplex_registry.peft.findings import Findings
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.peft.target import find_target_paths, judge_targets, natural_order, resolve_targets

SUFFIXES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODULES = [*SUFFIXES, "self_attn.q_proj", "1.self_attn.q_proj", "model.layers.0.mlp.up_proj", "layers.0.mlp", "absent"]
MODULES += ["norm", "input_layernorm", "lm_head", "embed_tokens", "mlp", "proj", ""]
EXPRESSIONS = [
    r".*layers\.1\..*(q|k)_proj",
    ".*_proj",
    "model.*mlp.*",
    "q_proj",
    "all-linear",
    "All-Linear",
    r"model\.norm",
]
KEYS = ["q_proj", "layers.0.self_attn.q_proj", "^model.layers.1.self_attn.q_proj", "proj", ".*proj", "v_proj|q_proj"]
KEYS += [r"layers\.[01]\.mlp\.up_proj", "mlp.up_proj", "model", "0.self_attn.v_proj", "self_attn.*", r"\w+_proj"]


def as_settings(config: Any) -> LoraSettings:
    def names(value: Any) -> Any:
        return tuple(sorted(value)) if isinstance(value, set | list) else value

    layers = config.layers_to_transform
    pattern = config.layers_pattern or ()
    return LoraSettings(
        r=config.r,
        lora_alpha=config.lora_alpha,
        use_rslora=config.use_rslora,
        rank_pattern=config.rank_pattern,
        alpha_pattern=config.alpha_pattern,
        target_modules=names(config.target_modules),
        exclude_modules=names(config.exclude_modules),
        layers_to_transform=(layers,) if isinstance(layers, int) else tuple(layers) if layers else None,
        layers_pattern=(pattern,) if isinstance(pattern, str) else tuple(pattern),
    )


def names_of(base: BaseSpec) -> list[str]:
    containers = {path.rpartition(".")[0] for path in base.modules} | {"model", "model.layers"}
    containers |= {f"model.layers.{layer}" for layer in range(2)}
    return sorted({*base.modules, *containers} - {""}, key=natural_order)


@pytest.fixture(scope="module")
def tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return lambda: LlamaForCausalLM(config)


def wrap(tiny: Any, config: Any) -> dict[str, tuple[int, float]]:
    """Path, rank and scaling of each module that PEFT wraps."""
    from peft import get_peft_model
    from peft.tuners.lora import LoraLayer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(tiny(), config)
    prefix = "base_model.model."
    return {
        name.removeprefix(prefix): (layer.r["default"], layer.scaling["default"])
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": None},
        {"target_modules": "all-linear"},
        {"target_modules": r".*layers\.1\..*(q|k)_proj", "use_rslora": True},
        {"target_modules": ["model.layers.1.mlp.up_proj", "absent", "o_proj"], "r": 1, "lora_alpha": 32},
        {"target_modules": SUFFIXES, "layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [1]},
        {"target_modules": SUFFIXES, "exclude_modules": ["layers.0.mlp.up_proj", "q_proj"]},
        {"target_modules": SUFFIXES, "exclude_modules": r".*\.0\..*"},
        {
            "target_modules": ["q_proj", "v_proj"],
            "r": 8,
            "lora_alpha": 16,
            "rank_pattern": {"layers.0.self_attn.q_proj": 2, "^model.layers.1.self_attn.q_proj": 4},
            "alpha_pattern": {"layers.1.self_attn.v_proj": 64},
        },
        {
            "target_modules": ["q_proj", "v_proj"],
            "use_rslora": True,
            "rank_pattern": {"self_attn.*": 2, "q_proj": 4, "proj": 5},
            "alpha_pattern": {"q_proj|v_proj": 3, "q_proj": 7.5},
        },
    ],
)
def test_paths_ranks_and_scalings_are_those_of_a_model_that_peft_wrapped(
    tiny: Any, base: BaseSpec, fields: dict[str, Any]
) -> None:
    from peft import LoraConfig

    expected = wrap(tiny, LoraConfig(task_type="CAUSAL_LM", **fields))
    settings = as_settings(LoraConfig(task_type="CAUSAL_LM", **fields))
    resolved = resolve_targets(settings, find_target_paths(settings, base)).targets
    assert {target.path: (target.rank, target.scaling) for target in resolved} == expected


CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "target_modules": st.lists(st.sampled_from(MODULES), min_size=1, max_size=4) | st.sampled_from(EXPRESSIONS),
        "exclude_modules": st.lists(st.sampled_from(MODULES), max_size=2) | st.sampled_from([".*mlp.*", r".*\.0\..*"]),
        "layers_to_transform": st.integers(0, 2) | st.lists(st.integers(0, 2), max_size=2),
        "layers_pattern": st.sampled_from(["layers", "h", "", "lay.rs", "(h|layers)"])
        | st.lists(st.sampled_from(["layers", "h", "model"]), max_size=2),
    },
)


@settings(deadline=None, max_examples=examples(40))
@given(CONFIGS)
def test_any_mix_of_target_fields_matches_what_peft_matches(fields: dict[str, Any]) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists

    assume("target_modules" in fields)
    try:
        config = LoraConfig(**fields)
    except ValueError:
        return
    base = BASE
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        config.target_modules = {path for path, spec in base.modules.items() if spec.kind == "linear"}
        fields = {**fields, "target_modules": "all-linear"}
    results = {name: check_target_module_exists(config, name) for name in names_of(base)}
    expected = [name for name, found in results.items() if found and not isinstance(found, _ExcludedModule)]
    config.target_modules = fields["target_modules"]
    assert find_target_paths(as_settings(config), base) == expected


@settings(deadline=None, max_examples=examples(20))
@given(
    st.dictionaries(st.sampled_from(KEYS), st.integers(1, 64), max_size=4),
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from([1, 2.5, 16, -4]), max_size=4),
    st.booleans(),
)
def test_any_patterns_give_peft_s_rank_and_scaling(
    ranks: dict[str, int], alphas: dict[str, float], use_rslora: bool
) -> None:
    from peft.utils.other import get_pattern_key

    paths = [path for path, spec in BASE.modules.items() if spec.kind == "linear"]
    config = LoraSettings(r=8, lora_alpha=16, rank_pattern=ranks, alpha_pattern=alphas, use_rslora=use_rslora)
    resolution = resolve_targets(config, paths)
    for target in resolution.targets:
        rank = ranks.get(get_pattern_key(list(ranks), target.path), 8)
        alpha = alphas.get(get_pattern_key(list(alphas), target.path), 16)
        assert (target.rank, target.alpha) == (rank, alpha)
        assert target.scaling == alpha / (math.sqrt(rank) if use_rslora else rank)


def judge(base: BaseSpec, **fields: Any) -> list[tuple[str, str, str]]:
    findings = Findings()
    judge_targets(LoraSettings(r=4, lora_alpha=8, **fields), base, findings)
    return [(check.name, check.verdict, check.message) for check in findings.checks()]


@pytest.mark.parametrize(
    ("targets", "check", "says"),
    [
        (("query_key_value",), "target_modules", "query_key_value"),
        (("qkv_proj", "gate_up_proj"), "target_modules", "gate_proj, k_proj"),
        ((), "target_modules", "matches no module"),
        ("(a+)+$", "target_modules", "matches no module"),
        (("mlp",), "target_modules", "not a linear layer"),
        (("norm",), "target_modules", "not a linear layer"),
        (("layers",), "target_modules", "not a linear layer"),
        ("((.*)*)*x", "target_modules", "processor time"),
        ("(", "target_modules", "not a valid"),
    ],
)
def test_targets_that_cannot_be_served_are_refused(base: BaseSpec, targets: Any, check: str, says: str) -> None:
    failed = [found for found in judge(base, target_modules=targets) if found[1] == "fail"]
    assert {name for name, _, _ in failed} == {check}
    assert says in failed[0][2]


def test_names_that_the_base_lacks_are_pointed_out_beside_ones_it_has(base: BaseSpec) -> None:
    [(name, verdict, message)] = judge(base, target_modules=("q_proj", "query"))
    assert (name, verdict) == ("target_modules", "warn")
    assert "query" in message


def test_a_bad_expression_is_reported_under_its_field(base: BaseSpec) -> None:
    for field, value in (("rank_pattern", {"(": 4}), ("alpha_pattern", {"(": 4}), ("exclude_modules", "(")):
        failed = [found for found in judge(base, target_modules=("q_proj",), **{field: value}) if found[1] == "fail"]
        assert [(name, message.startswith(field)) for name, _, message in failed] == [("field_value", True)]


def test_layer_ten_follows_layer_nine() -> None:
    paths = [f"model.layers.{layer}.x" for layer in (10, 9, 1)]
    assert sorted(paths, key=natural_order) == list(reversed(paths))


def _build() -> BaseSpec:
    from loraplex_registry.peft.spec import ModuleSpec

    modules = {
        f"model.layers.{layer}.{part}.{name}": ModuleSpec(8, 8)
        for layer in range(2)
        for part, names in (("self_attn", SUFFIXES[:4]), ("mlp", SUFFIXES[4:]))
        for name in names
    }
    modules |= {"model.norm": ModuleSpec(8, 1, "norm"), "lm_head": ModuleSpec(9, 8, "head")}
    modules |= {f"model.layers.{layer}.input_layernorm": ModuleSpec(8, 1, "norm") for layer in range(2)}
    modules["model.embed_tokens"] = ModuleSpec(9, 8, "embedding")
    return BaseSpec("tiny", (), "", "", 9, modules)


BASE = _build()
