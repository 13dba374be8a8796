"""What is found of one module in many layers is one check, and the first thing to read is what to mend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.findings import MAX_PER_NAME, Findings
from loraplex_registry.peft.report import Check, build_report
from loraplex_registry.peft.spec import BaseSpec

Write = Callable[..., dict[str, Path]]


def test_a_misspelt_target_is_named_once_for_each_module_with_its_cause_first(
    write_adapter: Write, base: BaseSpec, tensors: dict[str, np.ndarray]
) -> None:
    files = write_adapter(weights=tensors, target_modules=["q_proj", "gate_up_proj"])
    report, _ = check_adapter(files, base)
    (found,) = [check for check in report.checks if check.name == "unmatched_tensors"]
    assert found.subject == "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
    assert found.message.startswith("v_proj in layers 0-1 (4 tensors): ")
    assert "target_modules names gate_up_proj, which the base lacks" in found.message
    first, second, *_ = report.in_order()
    assert (first.name, first.verdict) == ("target_modules", "warn")
    assert (second.name, second.verdict) == ("unmatched_tensors", "fail")
    num_names = len({check.name for check in report.checks})
    assert report.count_passed() == (num_names - 2, num_names)


def test_another_rank_and_missing_magnitudes_are_one_check_for_each_module(
    write_adapter: Write, base: BaseSpec, tensors: dict[str, np.ndarray]
) -> None:
    for name, change in (("rank_mismatch", {"r": 8}), ("missing_tensors", {"use_dora": True})):
        report, _ = check_adapter(write_adapter(weights=tensors, **change), base)
        messages = [check.message for check in report.checks if check.name == name]
        assert [message.partition(" (")[0] for message in messages] == ["q_proj in layers 0-1", "v_proj in layers 0-1"]


def test_layers_are_ranges_and_what_is_found_of_one_tensor_keeps_its_words() -> None:
    findings = Findings()
    for layer in (0, 1, 2, 7, 9, 10):
        findings.fail("shape", f"a.layers.{layer}.mlp.up_proj is wrong", f"a.layers.{layer}.mlp.up_proj.weight")
    findings.fail("shape", "a.layers.3.mlp.up_proj is odd", "a.layers.3.mlp.up_proj.weight")
    findings.warn("shape", "a.layers.4.mlp.up_proj is wrong", "a.layers.4.mlp.up_proj.weight")
    assert [(check.verdict, check.message) for check in findings.checks()] == [
        ("fail", "up_proj in layers 0-2, 7, 9-10 (6 tensors): a.layers.0.mlp.up_proj is wrong"),
        ("fail", "a.layers.3.mlp.up_proj is odd"),
        ("warn", "a.layers.4.mlp.up_proj is wrong"),
    ]


def test_the_report_stays_short_however_many_kinds_there_are() -> None:
    findings = Findings()
    for number in range(MAX_PER_NAME + 5):
        for layer in (0, 1):
            findings.fail("shape", "wrong", f"a.layers.{layer}.module{number}.weight")
    checks = findings.checks()
    assert len(checks) == MAX_PER_NAME + 1
    assert checks[-1] == Check("shape", "fail", "10 more findings of this kind are left out.")


def test_warnings_lead_only_where_they_are_a_failure_s_cause() -> None:
    warned: Any = Check("target_modules", "warn", "m", "target_modules")
    failed = Check("shape", "fail", "m", "s")
    assert [check.name for check in build_report([warned, failed]).in_order()] == ["shape", "target_modules"]
