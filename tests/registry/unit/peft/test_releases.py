"""Every field that any release of PEFT has written is known here, and harmless at its default."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loraplex_registry.peft.config import AdapterConfig, judge_config
from loraplex_registry.peft.field_rule import (
    BASE_CHANGING_INITS,
    HARMLESS_FIELDS,
    HONOURED_FIELDS,
    KNOWN_FIELDS,
    PLAIN_INITS,
    REFUSED_FIELDS,
)
from loraplex_registry.peft.findings import Findings


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peft_releases", Path(__file__).with_name("peft_releases.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLE = _load()
RELEASES: dict[str, dict[str, Any]] = TABLE.list_releases()


def judge(config: dict[str, Any]) -> tuple[AdapterConfig | None, set[tuple[str, str]]]:
    findings = Findings()
    parsed = judge_config(json.dumps(config).encode(), findings)
    return parsed, {(check.name, check.subject) for check in findings.checks() if check.verdict == "fail"}


def trained(release: str, **changes: Any) -> dict[str, Any]:
    """A config as the release writes it, with what nobody trains without."""
    chosen = {"lora_alpha": 16, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    return RELEASES[release] | chosen | changes


@pytest.mark.parametrize("release", RELEASES)
def test_a_plain_lora_of_each_release_passes(release: str) -> None:
    assert RELEASES[release].keys() <= KNOWN_FIELDS
    parsed, failed = judge(trained(release))
    assert failed == set()
    assert parsed is not None
    assert parsed.settings is not None
    assert (parsed.settings.r, parsed.settings.lora_alpha, parsed.settings.bias) == (8, 16, "none")


def test_the_newest_release_here_is_the_installed_one() -> None:
    import peft

    newest = max(RELEASES, key=lambda release: int(release.partition(".")[2]))
    assert peft.__version__.startswith(f"{newest}."), "a new release: write down what it changed"
    fields = {field.name: field for field in dataclasses.fields(peft.LoraConfig)}
    assert fields.keys() == RELEASES[newest].keys()
    written = peft.LoraConfig().to_dict()
    same = fields.keys() - {"peft_type", "peft_version", "inference_mode", "runtime_config"}
    assert {name: written[name] for name in same} == {name: RELEASES[newest][name] for name in same}


def test_every_known_field_is_of_some_release() -> None:
    written = {name for fields in RELEASES.values() for name in fields}
    assert written == KNOWN_FIELDS


LIVE: dict[str, Any] = {
    "layer_replication": [[0, 1]],
    "target_parameters": ["mlp.experts"],
    "enable_lora": [True, False, True],
    "megatron_config": {"a": 1},
    "use_qalora": True,
    "use_bdlora": {"a": 1},
    "arrow_config": {"a": 1},
    "velora_config": {"a": 1},
    "monteclora_config": {"a": 1},
    "kasa_config": {"a": 1},
}


@pytest.mark.parametrize("field", REFUSED_FIELDS)
def test_a_refused_field_is_named_where_it_is_live_and_nothing_where_it_is_off(field: str) -> None:
    assert LIVE.keys() == REFUSED_FIELDS.keys()
    release = next(release for release, fields in RELEASES.items() if field in fields)
    for live in (LIVE[field], True, 1, 0, "x", 0.0):
        parsed, failed = judge(trained(release, **{field: live}))
        assert failed == {("field_unsupported", field)}
        assert parsed is not None
        assert list(parsed.refused) == [field]
    for off in (None, False, "", [], {}):
        assert judge(trained(release, **{field: off}))[1] == set()


@pytest.mark.parametrize("field", HARMLESS_FIELDS)
@pytest.mark.parametrize("value", ["8", True, "false", 0, None, {"a": [1]}, -1.5, [None]])
def test_a_harmless_field_may_hold_anything(field: str, value: Any) -> None:
    assert judge(trained("0.21", **{field: value}))[1] == set()


ODD: tuple[Any, ...] = ("8", True, "false", 0, 8.0, -1, {}, [], "", [8], {"a": "8"}, 1e308, 10**400, -(10**400))
MEANT: dict[str, tuple[Any, ...]] = {
    "r": (),
    "lora_alpha": (8.0, -1),
    "use_rslora": (True,),
    "use_dora": (True,),
    "lora_bias": (True,),
    "ensure_weight_tying": (True,),
    "init_lora_weights": (True,),
    "bias": (),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": ([],),
    "layers_to_transform": (0, [], [8]),
    "layers_pattern": ("", []),
    "target_modules": ("8", "false", "", []),
    "exclude_modules": ("8", "false", "", []),
    "trainable_token_indices": ({}, [], [8]),
    "alora_invocation_tokens": ([], [8]),
}
"""Of the odd values, those that the field may have; lists and objects of nothing are off."""


@pytest.mark.parametrize(
    "field", sorted(HONOURED_FIELDS.keys() - {"peft_type", "task_type", "base_model_name_or_path"})
)
def test_types_of_honoured_fields_are_exact(field: str) -> None:
    assert MEANT.keys() == HONOURED_FIELDS.keys() - {"peft_type", "task_type", "base_model_name_or_path"}
    for value in ODD:
        _, failed = judge(trained("0.21", **{field: value}))
        is_meant = any(type(value) is type(meant) and value == meant for meant in MEANT[field])
        assert failed == (set() if is_meant else {("field_value", field)}), value


@pytest.mark.parametrize("release", TABLE.INITS)
def test_each_initialisation_of_each_release_is_plain_or_refused(release: str) -> None:
    for init in TABLE.INITS[release]:
        _, failed = judge(trained("0.21", init_lora_weights=init))
        is_refused = isinstance(init, str) and init.startswith(BASE_CHANGING_INITS)
        assert failed == ({("field_unsupported", "init_lora_weights")} if is_refused else set()), init
        assert is_refused or init in (True, False, *PLAIN_INITS)
