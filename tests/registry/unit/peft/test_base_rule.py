from __future__ import annotations

from typing import Any

import pytest

from loraplex_registry.peft.base_rule import judge_base_name, matches_base
from loraplex_registry.peft.findings import Findings
from loraplex_registry.peft.spec import BaseSpec

ACCEPTED = ("HuggingFaceTB/SmolLM2-135M-Instruct", "unsloth/SmolLM2-135M-Instruct", "smollm2")


@pytest.fixture
def smol(make_base: Any) -> BaseSpec:
    return make_base(name="smollm2-135m", accepted_names=ACCEPTED)


@pytest.mark.parametrize(
    "name",
    [
        "smollm2-135m",
        "SmolLM2-135M",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "huggingfacetb/smollm2-135m-instruct",
        "unsloth/SmolLM2-135M-Instruct",
        "SmolLM2-135M-Instruct",
        "smollm2",
        "/root/models/smollm2-135m",
        "/root/models/smollm2-135m/",
        "./smollm2-135m",
        "~/bases/SmolLM2-135M-Instruct",
        "C:\\models\\smollm2",
        "models\\smollm2",
        "a/b/smollm2",
        "/Users/Jürgen/模型/smollm2-135m",
    ],
)
def test_names_of_the_base_and_local_paths_that_end_in_one_match(smol: BaseSpec, name: str) -> None:
    assert matches_base(name, smol)


@pytest.mark.parametrize(
    "name",
    [
        "other-org/SmolLM2-135M-Instruct",
        "models/smollm2-135m",
        "SmolLM2-360M",
        "smollm2-135m ",
        "/root/smollm2-135m/checkpoint-500",
        "/",
        "",
        "HuggingFaceTB",
        "SmolLM2-135M-Instruct-bnb-4bit",
    ],
)
def test_other_models_do_not_match_even_with_the_same_last_part(smol: BaseSpec, name: str) -> None:
    assert not matches_base(name, smol)


def test_a_mismatch_says_the_accepted_names_and_the_fix(smol: BaseSpec) -> None:
    findings = Findings()
    judge_base_name("/tmp/run7", smol, findings, forced=False)
    [check] = findings.checks()
    assert (check.name, check.verdict, check.subject) == ("base_mismatch", "fail", "base_model_name_or_path")
    assert all(name in check.message for name in ACCEPTED)
    assert check.message.endswith('set it to "smollm2-135m".')


@pytest.mark.parametrize("name", ["other/model", None])
def test_a_forced_base_stays_in_the_report_as_a_warning(smol: BaseSpec, name: str | None) -> None:
    findings = Findings()
    judge_base_name(name, smol, findings, forced=True)
    [check] = findings.checks()
    assert (check.name, check.verdict) == ("base_mismatch", "warn")
    assert "forced" in check.message
