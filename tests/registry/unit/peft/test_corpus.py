"""Real and hostile adapters from a folder of cases, where the machine has one (LORAPLEX_TEST_CASES)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.config import judge_config
from loraplex_registry.peft.findings import Findings
from loraplex_registry.peft.spec import BaseSpec, ModuleSpec

CASES = os.environ.get("LORAPLEX_TEST_CASES")
NUM_CONFIGS, NUM_WEIGHTS = 106, 6
"""What the folder holds at least: with fewer the loops below would prove nothing."""
pytestmark = pytest.mark.skipif(not CASES, reason="LORAPLEX_TEST_CASES names no folder of cases")

NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 17, 19, 20, 21)
ACCEPTED = [*(f"F{number:02}" for number in NUMBERS), "X44", "X47"]
REFUSED = {
    "F16": "field_unsupported",
    "F18": "field_unsupported",
    "X05": "missing_tensors",
    "X06": "unpaired_tensors",
    "X07": "rank_mismatch",
    "X10": "truncated",
    "X11": "truncated",
    "X12": "lfs_pointer",
    "X17": "pickle",
    "X18": "field_value",
    "X30": "field_value",
    "X31": "field_value",
    "X32": "field_value",
    "X33": "field_value",
    "X34": "json",
    "X35": "field_value",
    "X36": "target_modules",
    "X37": "target_modules",
    "X38": "target_modules",
    "X39": "peft_type",
    "X40": "peft_type",
    "X41": "task_type",
    "X42": "base_mismatch",
    "X43": "field_unsupported",
    "X45": "missing_tensors",
    "X46": "missing_tensors",
    "X50": "unexpected_tensor",
    "X51": "field_value",
    "X52": "json",
    "X53": "json",
    "X54": "json",
    "X55": "json",
    "X56": "rank_limit",
}


def build_fixture_base() -> BaseSpec:
    shapes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
    modules = {f"model.layers.{n}.self_attn.{name}_proj": ModuleSpec(*shapes[name]) for n in (0, 1) for name in shapes}
    inner = {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    modules |= {f"model.layers.{n}.mlp.{name}_proj": ModuleSpec(*inner[name]) for n in (0, 1) for name in inner}
    modules["model.norm"] = ModuleSpec(64, 1, "norm")
    modules["model.embed_tokens"] = ModuleSpec(320, 64, "embedding")
    modules["lm_head"] = ModuleSpec(320, 64, "head")
    return BaseSpec("tiny-llama-fixture", (), "sha256:" + "0" * 64, "sha256:" + "0" * 64, 320, modules)


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fixtures")
    script = Path(str(CASES)) / "make_fixtures.py"
    command = [sys.executable, str(script), "--base", "tiny", "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=600, cwd=folder)
    return {path.name[:3]: path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("_")}


def files_of(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir() if not path.name.startswith(("_", "INFO"))}


def test_every_fixture_gets_its_verdict(fixtures: dict[str, Path]) -> None:
    base = build_fixture_base()
    assert fixtures.keys() == {*ACCEPTED, *REFUSED}
    for name, folder in sorted(fixtures.items()):
        report, plan = check_adapter(files_of(folder), base)
        failed = {check.name for check in report.checks if check.verdict == "fail"}
        assert (plan is None) == (name in REFUSED), (name, failed)
        assert name in ACCEPTED or REFUSED[name] in failed, (name, failed)
    assert not list(fixtures["F01"].parent.rglob("LORA_*_MARKER"))


def test_every_published_config_gets_a_verdict_and_names_what_it_refuses() -> None:
    known = {"json", "lfs_pointer", "peft_type", "task_type", "field_unsupported", "field_value"}
    paths = sorted((Path(str(CASES)) / "configs").glob("*.json"))
    assert len(paths) >= NUM_CONFIGS
    for path in paths:
        findings = Findings()
        judge_config(path.read_bytes(), findings)
        failed = [check for check in findings.checks() if check.verdict == "fail"]
        assert {check.name for check in failed} <= known
        assert all(check.subject and check.message for check in failed)


@pytest.mark.parametrize("forced", [False, True])
def test_no_published_adapter_of_another_base_is_accepted(forced: bool) -> None:
    folders = sorted(folder for folder in (Path(str(CASES)) / "weights").iterdir() if folder.is_dir())
    assert len(folders) >= NUM_WEIGHTS
    for folder in folders:
        report, plan = check_adapter(files_of(folder), build_fixture_base(), forced_base=forced)
        assert plan is None, folder
        assert report.first_failure is not None
