from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex_registry.peft.config import AdapterConfig, judge_config
from loraplex_registry.peft.field_rule import HARMLESS_FIELDS, HONOURED_FIELDS, KNOWN_FIELDS, REFUSED_FIELDS
from loraplex_registry.peft.findings import Findings

MakeConfig = Callable[..., dict[str, Any]]


def judge(config: object) -> tuple[AdapterConfig | None, list[tuple[str, str]]]:
    findings = Findings()
    parsed = judge_config(json.dumps(config).encode(), findings)
    return parsed, [(check.name, check.subject) for check in findings.checks() if check.verdict == "fail"]


def test_every_field_of_the_installed_peft_has_a_stated_fate_and_passes_at_its_default() -> None:
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields <= KNOWN_FIELDS
    written = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]).to_dict()
    written["target_modules"] = ["q_proj"]
    parsed, failed = judge(written)
    assert failed == []
    assert parsed is not None
    assert parsed.settings is not None


def test_each_field_has_one_fate() -> None:
    tables = (HONOURED_FIELDS, HARMLESS_FIELDS, REFUSED_FIELDS)
    assert sum(len(table) for table in tables) == len(KNOWN_FIELDS)


@pytest.mark.parametrize(
    ("changes", "check", "field"),
    [
        ({"r": "8"}, "field_value", "r"),
        ({"r": 0}, "field_value", "r"),
        ({"r": -1}, "field_value", "r"),
        ({"r": True}, "field_value", "r"),
        ({"r": 8.0}, "field_value", "r"),
        ({"r": None}, "field_value", "r"),
        ({"r": ...}, "field_value", "r"),
        ({"r": 10**300}, "field_value", "r"),
        ({"lora_alpha": ...}, "field_value", "lora_alpha"),
        ({"lora_alpha": None}, "field_value", "lora_alpha"),
        ({"lora_alpha": 0}, "field_value", "lora_alpha"),
        ({"lora_alpha": 0.0}, "field_value", "lora_alpha"),
        ({"lora_alpha": "16"}, "field_value", "lora_alpha"),
        ({"lora_alpha": False}, "field_value", "lora_alpha"),
        ({"lora_alpha": 10**400}, "field_value", "lora_alpha"),
        ({"lora_alpha": 1e300}, "field_value", "lora_alpha"),
        ({"use_rslora": "false"}, "field_value", "use_rslora"),
        ({"use_rslora": 1}, "field_value", "use_rslora"),
        ({"rank_pattern": {"q_proj": 0}}, "field_value", "rank_pattern"),
        ({"rank_pattern": {"q_proj": "4"}}, "field_value", "rank_pattern"),
        ({"rank_pattern": ["q_proj"]}, "field_value", "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 0}}, "field_value", "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": True}}, "field_value", "alpha_pattern"),
        ({"target_modules": [1]}, "field_value", "target_modules"),
        ({"target_modules": {"q_proj": 1}}, "field_value", "target_modules"),
        ({"exclude_modules": 5}, "field_value", "exclude_modules"),
        ({"layers_to_transform": ["1"]}, "field_value", "layers_to_transform"),
        ({"layers_to_transform": -1}, "field_value", "layers_to_transform"),
        ({"layers_to_transform": True}, "field_value", "layers_to_transform"),
        ({"target_modules": "all-linear", "layers_to_transform": [0]}, "field_value", "layers_to_transform"),
        ({"layers_pattern": "layers"}, "field_value", "layers_pattern"),
        ({"bias": "some"}, "field_value", "bias"),
        ({"bias": 1}, "field_value", "bias"),
        ({"init_lora_weights": "magic"}, "field_value", "init_lora_weights"),
        ({"init_lora_weights": 1}, "field_value", "init_lora_weights"),
        ({"bias": ["all"]}, "field_value", "bias"),
        ({"init_lora_weights": "pissa"}, "field_unsupported", "init_lora_weights"),
        ({"init_lora_weights": "pissa_niter_16"}, "field_unsupported", "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "field_unsupported", "init_lora_weights"),
        ({"init_lora_weights": "corda"}, "field_unsupported", "init_lora_weights"),
        ({"init_lora_weights": "loftq"}, "field_unsupported", "init_lora_weights"),
        ({"init_lora_weights": "lora_ga"}, "field_unsupported", "init_lora_weights"),
        ({"use_dora": "false"}, "field_value", "use_dora"),
        ({"use_dora": 1}, "field_value", "use_dora"),
        ({"use_dora": True, "init_lora_weights": "mica"}, "field_value", "use_dora"),
        ({"lora_bias": "true"}, "field_value", "lora_bias"),
        ({"lora_bias": True, "use_dora": True}, "field_value", "lora_bias"),
        ({"lora_bias": True, "init_lora_weights": "gaussian"}, "field_value", "lora_bias"),
        ({"ensure_weight_tying": "yes"}, "field_value", "ensure_weight_tying"),
        ({"modules_to_save": "lm_head"}, "field_value", "modules_to_save"),
        ({"modules_to_save": [""]}, "field_value", "modules_to_save"),
        ({"modules_to_save": ["(a+)+$"]}, "field_value", "modules_to_save"),
        ({"modules_to_save": [1]}, "field_value", "modules_to_save"),
        ({"modules_to_save": ["lm_head"] * 257}, "field_value", "modules_to_save"),
        ({"trainable_token_indices": 5}, "field_value", "trainable_token_indices"),
        ({"trainable_token_indices": [-1]}, "field_value", "trainable_token_indices"),
        ({"trainable_token_indices": [5, 5]}, "field_value", "trainable_token_indices"),
        ({"trainable_token_indices": [True]}, "field_value", "trainable_token_indices"),
        ({"trainable_token_indices": {"lm_head": []}}, "field_value", "trainable_token_indices"),
        ({"trainable_token_indices": {"lm_head": {"x": [1]}}}, "field_value", "trainable_token_indices"),
        ({"trainable_token_indices": {"": [1]}}, "field_value", "trainable_token_indices"),
        ({"trainable_token_indices": {f"m{i}": [1] for i in range(257)}}, "field_value", "trainable_token_indices"),
        ({"alora_invocation_tokens": 1}, "field_value", "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [-1]}, "field_value", "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1], "use_dora": True}, "field_value", "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1], "init_lora_weights": "mica"}, "field_value", "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1], "task_type": None}, "field_value", "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1], "bias": "all"}, "field_value", "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1], "modules_to_save": ["norm"]}, "field_value", "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1], "trainable_token_indices": [1]}, "field_value", "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, "field_unsupported", "layer_replication"),
        ({"target_parameters": ["x"]}, "field_unsupported", "target_parameters"),
        ({"use_qalora": True}, "field_unsupported", "use_qalora"),
        ({"use_bdlora": {"nblocks": 2}}, "field_unsupported", "use_bdlora"),
        ({"arrow_config": {"top_k": 3}}, "field_unsupported", "arrow_config"),
        ({"megatron_config": {"tp": 2}}, "field_unsupported", "megatron_config"),
        ({"kasa_config": {"beta": 1}}, "field_unsupported", "kasa_config"),
        ({"velora_config": {"scale": 1}}, "field_unsupported", "velora_config"),
        ({"monteclora_config": {"num_samples": 8}}, "field_unsupported", "monteclora_config"),
        ({"enable_lora": [True, False]}, "field_unsupported", "enable_lora"),
        ({"some_future_option": {"x": 1}}, "field_unsupported", "some_future_option"),
        ({"some_future_option": 0}, "field_unsupported", "some_future_option"),
        ({"peft_type": "IA3"}, "peft_type", "peft_type"),
        ({"peft_type": "lora"}, "peft_type", "peft_type"),
        ({"peft_type": ...}, "peft_type", "peft_type"),
        ({"peft_type": ["LORA"]}, "peft_type", "peft_type"),
        ({"task_type": "SEQ_CLS"}, "task_type", "task_type"),
        ({"task_type": "causal_lm"}, "task_type", "task_type"),
        ({"task_type": 1}, "task_type", "task_type"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_its_field(
    make_config: MakeConfig, changes: dict[str, Any], check: str, field: str
) -> None:
    parsed, failed = judge(make_config(**changes))
    assert failed == [(check, field)]
    assert parsed is None or (parsed.settings is None) == (check == "field_value")


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": None},
        {"rank_pattern": None, "alpha_pattern": None, "use_rslora": None},
        {"task_type": None},
        {"task_type": ...},
        {"some_future_option": None, "another": False, "third": [], "fourth": {}, "fifth": ""},
        {"enable_lora": None, "merge_weights": False},
        {"lora_dropout": 0.5, "inference_mode": True, "revision": "abc", "peft_version": "9.9"},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 1.0}},
        {"loftq_config": {"loftq_bits": 4}},
        {"fan_in_fan_out": True},
        {"auto_mapping": {"base_model_class": "X", "parent_library": "y"}},
        {"layers_to_transform": [], "layers_pattern": []},
        {"lora_alpha": -16},
        {"use_dora": False, "modules_to_save": [], "megatron_config": {}},
        {"trainable_token_indices": [], "alora_invocation_tokens": [], "ensure_weight_tying": True},
    ],
)
def test_values_without_influence_are_accepted(make_config: MakeConfig, changes: dict[str, Any]) -> None:
    parsed, failed = judge(make_config(**changes))
    assert failed == []
    assert parsed is not None
    assert parsed.refused == {}


def test_single_values_become_tuples_and_patterns_keep_their_order(make_config: MakeConfig) -> None:
    parsed, _ = judge(
        make_config(layers_to_transform=1, layers_pattern="layers", rank_pattern={"b": 1, "a": 2}, lora_alpha=16.5)
    )
    assert parsed is not None
    settings = parsed.settings
    assert settings is not None
    assert (settings.layers_to_transform, settings.layers_pattern) == ((1,), ("layers",))
    assert (list(settings.rank_pattern), settings.lora_alpha) == (["b", "a"], 16.5)


def test_a_misspelt_alpha_is_pointed_out_and_none_is_invented(make_config: MakeConfig) -> None:
    parsed, failed = judge(make_config(lora_alpha=..., alpha=16))
    assert failed == [("field_unsupported", "alpha"), ("field_value", "lora_alpha")]
    assert parsed is not None
    assert "lora_alpha" in parsed.refused["alpha"]


@pytest.mark.parametrize(
    ("config", "origin"),
    [
        ({"fine_tune_type": "lora", "lora_parameters": {}}, "MLX"),
        ({"config": {}, "model_class": "BertAdapterModel"}, "AdapterHub"),
    ],
)
def test_adapters_of_other_tools_are_recognised(config: dict[str, Any], origin: str) -> None:
    findings = Findings()
    assert judge_config(json.dumps(config).encode(), findings) is None
    assert origin in findings.checks()[-1].message


def test_a_pointer_file_instead_of_a_config_is_named() -> None:
    findings = Findings()
    assert judge_config(b"version https://git-lfs.github.com/spec/v1\n", findings) is None
    assert [check.name for check in findings.checks()] == ["lfs_pointer"]


@pytest.mark.parametrize("data", [b"[]", b"1", b"null", b'"x"', b"", b"\xef\xbb\xbf{}"])
def test_what_is_not_one_json_object_fails_the_check_json(data: bytes) -> None:
    findings = Findings()
    assert judge_config(data, findings) is None
    assert [(check.name, check.verdict) for check in findings.checks()] == [("json", "fail")]


def test_ten_thousand_unknown_fields_give_a_short_report(make_config: MakeConfig) -> None:
    parsed, failed = judge({**make_config(), **{f"field_{number}": 1 for number in range(10_000)}})
    assert parsed is not None
    assert len(parsed.refused) == 50
    assert len(failed) == 21


ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.floats(-1e9, 1e9) | st.sampled_from(["", "q_proj", "none"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["q_proj", "x"]), inner, max_size=2),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(sorted(KNOWN_FIELDS)), ANY_VALUE, max_size=5))
def test_any_values_give_a_verdict_and_never_an_exception(make_config: MakeConfig, changes: dict[str, Any]) -> None:
    parsed, failed = judge({**make_config(), **changes})
    assert parsed is None or (parsed.settings is None) == any(name == "field_value" for name, _ in failed)
