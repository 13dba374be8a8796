from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.digest import TensorHash, canonical_digest
from loraplex_registry.peft.spec import AdapterPlan, BaseSpec

Write = Callable[..., dict[str, Path]]
Make = Callable[..., Any]


def plan_of(files: dict[str, Path], base: BaseSpec) -> AdapterPlan:
    report, plan = check_adapter(files, base)
    assert plan is not None, report.checks
    return plan


def test_the_digest_is_that_of_the_documented_form(
    write_adapter: Write, base: BaseSpec, tensors: dict[str, np.ndarray]
) -> None:
    plan = plan_of(write_adapter(weights=tensors), base)
    form = {
        "v": 1,
        "base": base.fingerprint,
        "config": {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "use_rslora": False,
            "rank_pattern": {},
            "alpha_pattern": {},
            "target_modules": ["q_proj", "v_proj"],
            "exclude_modules": None,
            "layers_to_transform": None,
            "layers_pattern": [],
        },
        "template": None,
        "tensors": [
            {
                "name": name,
                "dtype": "F32",
                "shape": list(tensors[name].shape),
                "sha256": hashlib.sha256(tensors[name].tobytes()).hexdigest(),
            }
            for name in sorted(tensors)
        ],
    }
    text = json.dumps(form, sort_keys=True, separators=(",", ":"))
    assert plan.digest == "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    assert plan.config == form["config"]


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["v_proj", "q_proj", "v_proj"]},
        {"lora_alpha": 8.0},
        {"bias": None, "rank_pattern": None, "alpha_pattern": {}, "use_rslora": None},
        {"peft_version": "0.99", "lora_dropout": 0.3, "revision": "main", "inference_mode": True},
        {"base_model_name_or_path": "tiny"},
        {"some_future_option": None},
        {"task_type": None},
    ],
)
def test_spelling_and_display_fields_do_not_change_the_digest(
    write_adapter: Write, base: BaseSpec, fields: dict[str, Any]
) -> None:
    expected = plan_of(write_adapter(), base).digest
    assert plan_of(write_adapter(**fields), base).digest == expected


def test_order_of_tensors_and_keys_and_free_metadata_do_not_change_the_digest(
    write_adapter: Write, make_config: Make, base: BaseSpec, tensors: dict[str, np.ndarray]
) -> None:
    fields = {"alpha_pattern": {"layers.0.self_attn.q_proj": 2, "layers.1.self_attn.q_proj": 4}}
    expected = plan_of(write_adapter(weights=tensors, **fields), base)
    config = make_config(alpha_pattern=dict(reversed(fields["alpha_pattern"].items())))
    turned = dict(reversed(config.items()))
    files = write_adapter(weights=dict(reversed(tensors.items())), config=json.dumps(turned, indent=3).encode())
    plan = plan_of(files, base)
    assert plan.digest == expected.digest
    assert [module.scaling for module in plan.modules] == [module.scaling for module in expected.modules]


def test_order_of_overlapping_keys_changes_both_meaning_and_digest(write_adapter: Write, base: BaseSpec) -> None:
    one = plan_of(write_adapter(alpha_pattern={"q_proj": 2, "self_attn.q_proj": 4}), base)
    other = plan_of(write_adapter(alpha_pattern={"self_attn.q_proj": 4, "q_proj": 2}), base)
    assert one.modules[0].scaling != other.modules[0].scaling
    assert one.digest != other.digest


@pytest.mark.parametrize(
    "fields",
    [{"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 9}}, {"target_modules": ".*[qv]_proj"}],
)
def test_whatever_is_honoured_changes_the_digest(write_adapter: Write, base: BaseSpec, fields: dict[str, Any]) -> None:
    expected = plan_of(write_adapter(), base).digest
    assert plan_of(write_adapter(**fields), base).digest != expected


def test_one_bit_of_one_tensor_or_another_base_changes_the_digest(
    write_adapter: Write, make_base: Make, base: BaseSpec, tensors: dict[str, np.ndarray]
) -> None:
    expected = plan_of(write_adapter(weights=tensors), base).digest
    other = make_base(fingerprint="sha256:" + "c" * 64)
    assert plan_of(write_adapter(weights=tensors), other).digest != expected
    next(iter(tensors.values())).view("<u4")[0, 0] ^= 1
    assert plan_of(write_adapter(weights=tensors), base).digest != expected


def test_weights_digest_of_the_base_is_outside(write_adapter: Write, make_base: Make, base: BaseSpec) -> None:
    other = make_base(weights_digest="sha256:" + "c" * 64)
    assert plan_of(write_adapter(), other).digest == plan_of(write_adapter(), base).digest


def test_tensors_are_sorted_by_name() -> None:
    one, two = TensorHash("a", "F32", (1,), "0"), TensorHash("b", "F16", (2,), "1")
    assert canonical_digest("x", {}, [one, two]) == canonical_digest("x", {}, [two, one])
    assert canonical_digest("x", {}, [one]) != canonical_digest("x", {}, [two])
