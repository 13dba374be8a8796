"""Cases of section 1: configs and numbers. What is served is PEFT's, what is not is refused by name.

Every kind beside every other is compared with PEFT in `engine/golden/test_parity.py`; here are the forms of the cases
that a kind alone does not show.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel, PeftType
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from case_world import Cases, World
from engines import QV, SEVEN, EngineWorld, SavedJudge, assert_logits_close
from loraplex_engine.bases.pull import pull
from loraplex_engine.lora.disk import AdapterDisk
from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.report import Report
from loraplex_registry.peft.spec import BaseSpec
from loraplex_registry.wire.digest import artifact_path

PROMPT = [(37 * i + 11) % 300 + 3 for i in range(24)]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def world(cases: Cases) -> World:
    return cases.world(max_loras=4)


@pytest.fixture
def copy(cases: Cases, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a good adapter, to be changed."""

    def make(name: str) -> Path:
        shutil.copytree(cases.folders[name], tmp_path / name, ignore=shutil.ignore_patterns("README.md"))
        return tmp_path / name

    return make


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def judge(folder: Path, base: BaseSpec) -> tuple[Report, set[str]]:
    """The report on a folder, and the checks that fail."""
    report, plan = check_adapter({file.name: file for file in folder.iterdir()}, base)
    failed = {check.name for check in report.checks if check.verdict == "fail"}
    assert (plan is None) == bool(failed)
    return report, failed


def messages(report: Report) -> str:
    return "\n".join(f"{check.subject} {check.message}" for check in report.checks if check.verdict == "fail")


def write_pairs(file: Path, pairs: list[tuple[str, Any]]) -> None:
    file.write_text("{" + ",".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in pairs) + "}")


@pytest.mark.parametrize("name", ["F01", "F04", "F06", "F20"])
def test_b002_what_is_stored_is_what_was_sent(world: World, cases: Cases, tmp_path: Path, name: str) -> None:
    disk = AdapterDisk(tmp_path, world.loader.spec, None)
    stored = tmp_path / artifact_path(disk.put(cases.folders[name]))
    for file in (CONFIG, WEIGHTS):
        assert (stored / file).read_bytes() == (cases.folders[name] / file).read_bytes()
    assert world.is_parity(name, PROMPT, world.score([(PROMPT, world.put(stored))])[0])


def test_b005_order_in_the_files_means_nothing(
    cases: Cases, world: World, copy: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = world.logits(("F06", PROMPT))[0]
    folder = copy("F06")
    write_pairs(folder / CONFIG, list(json.loads((folder / CONFIG).read_text()).items())[::-1])
    tensors = load_file(folder / WEIGHTS)
    write_reversed(folder / WEIGHTS, tensors)
    other = EngineWorld(cases.base, tmp_path / "cache", cpu_threads=1)
    digest = other.put(folder)
    assert digest == world.digest_of["F06"]
    assert torch.equal(other.score([(PROMPT, digest)])[0], expected)


def write_reversed(file: Path, tensors: dict[str, Any]) -> None:
    """The same tensors, names and bytes from last to first."""
    header: dict[str, Any] = {}
    data = b""
    for name in sorted(tensors, reverse=True):
        raw = np.ascontiguousarray(tensors[name]).tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensors[name].shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("changes", [{"lora_alpha": ...}, {"lora_alpha": ..., "alpha": 16}], ids=["none", "misnamed"])
def test_b006_no_scaling_is_invented(world: World, copy: Callable[[str], Path], changes: dict[str, Any]) -> None:
    folder = copy("F01")
    change_config(folder, **changes)
    report, failed = judge(folder, world.loader.spec)
    assert "field_value" in failed
    assert "lora_alpha" in messages(report)


@pytest.mark.parametrize("name", ["F20", "F03", "F19"])
def test_b007_alpha_is_divided_by_the_rank(world: World, name: str) -> None:
    assert world.is_parity(name, PROMPT, world.logits((name, PROMPT))[0])


def test_b008_magnitudes_without_the_flag_and_the_flag_without_magnitudes(
    cases: Cases, world: World, copy: Callable[[str], Path], tmp_path: Path
) -> None:
    dora = SavedJudge(cases.base, {"F05": {"target_modules": QV, "use_dora": True}}, tmp_path / "dora", std=0.2)
    assert_logits_close(
        world.score([(PROMPT, world.put(dora.folders["F05"]))])[0],
        dora.logits([PROMPT], "F05")[0],
        atol=1e-4,
        gap=1e-3,
    )
    change_config(dora.folders["F05"], use_dora=False)
    report, failed = judge(dora.folders["F05"], world.loader.spec)
    assert failed == {"unexpected_tensor"}
    assert "lora_magnitude_vector" in messages(report)
    flagged = copy("F01")
    change_config(flagged, use_dora=True)
    report, failed = judge(flagged, world.loader.spec)
    assert failed == {"missing_tensors"}
    assert "lora_magnitude_vector" in messages(report)


def test_b010_a_claimed_head_must_be_there(world: World, copy: Callable[[str], Path]) -> None:
    folder = copy("F01")
    change_config(folder, modules_to_save=["lm_head"])
    report, failed = judge(folder, world.loader.spec)
    assert failed == {"missing_tensors"}
    assert "lm_head" in messages(report)


def test_b010_a_saved_head_is_used_and_the_base_beside_it_is_not_touched(
    cases: Cases, world: World, tmp_path: Path
) -> None:
    saved = SavedJudge(cases.base, {"F14": {"target_modules": QV, "modules_to_save": ["lm_head"]}}, tmp_path, std=0.2)
    before = world.logits((None, PROMPT))[0]
    digest = world.put(saved.folders["F14"])
    for _ in range(2):
        base, found = world.score([(PROMPT, None), (PROMPT, digest)])
        assert torch.equal(base, before)
        assert_logits_close(found, saved.logits([PROMPT], "F14")[0], atol=1e-4, gap=1e-3)


@pytest.mark.parametrize(
    "rows",
    [{"lm_head": 5, "model.embed_tokens": 5}, {"lm_head": 333}, {"model.embed_tokens": 333}],
    ids=["b011_few", "b026_padded_head", "b027_other_vocabulary"],
)
@pytest.mark.parametrize("is_declared", [True, False])
def test_b011_b026_b027_rows_of_another_vocabulary_are_named(
    world: World, copy: Callable[[str], Path], rows: dict[str, int], is_declared: bool
) -> None:
    folder = copy("F01")
    if is_declared:
        change_config(folder, modules_to_save=[path.rpartition(".")[2] for path in rows])
    half = {f"{PREFIX}{path}.weight": np.zeros((count, 72), np.float16) for path, count in rows.items()}
    change_tensors(folder, lambda tensors: tensors.update(half))
    report, failed = judge(folder, world.loader.spec)
    assert "shape" in failed, failed
    said = messages(report)
    for name, values in half.items():
        assert name in said
        assert str([*values.shape]) in said
    assert "[331, 72]" in said


@pytest.mark.parametrize("base", ["tiny_llama", "tiny_qwen2"])
def test_b014_b015_parts_of_fused_projections_under_grouped_queries(
    request: pytest.FixtureRequest, base: str, tmp_path: Path
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        name: {"r": 8, "lora_alpha": 16, "target_modules": [name]}
        for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    }
    kinds["F01"] = {"r": 8, "lora_alpha": 16, "target_modules": QV}
    folder = pull(str(request.getfixturevalue(base)), tmp_path / "bases")
    saved = SavedJudge(folder, kinds, tmp_path / "peft", std=0.2)
    engine = EngineWorld(folder, tmp_path / "cache", cpu_threads=1)
    found = engine.score([(PROMPT, engine.put(saved.folders[name])) for name in kinds])
    for name, logits in zip(kinds, found, strict=True):
        assert_logits_close(logits, saved.logits([PROMPT], name)[0], atol=1e-4, gap=1e-3)


@pytest.mark.parametrize("targets", [["qkv_proj"], ["gate_up_proj", "qkv_proj"], ["query_key_value"], []], ids=str)
def test_b016_names_that_the_base_does_not_have_are_listed(
    world: World, copy: Callable[[str], Path], targets: list[str]
) -> None:
    folder = copy("F01")
    change_config(folder, target_modules=targets)
    report, failed = judge(folder, world.loader.spec)
    assert "target_modules" in failed
    said = messages(report)
    assert all(name in said for name in (*targets, *(SEVEN if targets else ())))


@pytest.mark.parametrize("spelling", [".base_layer.bias", ".bias"], ids=["new", "old"])
def test_b017_a_trained_bias_counts_however_it_is_spelt(tiny_qwen2: Path, tmp_path: Path, spelling: str) -> None:
    base = pull(str(tiny_qwen2), tmp_path / "bases")
    saved = SavedJudge(base, {"bias": {"target_modules": QV, "bias": "lora_only"}}, tmp_path / "peft", std=0.2)
    reference = saved.logits([PROMPT], "bias")[0]
    folder = saved.folders["bias"]
    written = [name for name in load_file(folder / WEIGHTS) if name.endswith("bias")]
    assert len(written) == 4

    def spell(tensors: dict[str, Any]) -> None:
        for name in written:
            stem = name.removesuffix(".bias").removesuffix(".base_layer")
            tensors[stem + spelling] = tensors.pop(name)

    change_tensors(folder, spell)
    engine = EngineWorld(base, tmp_path / "cache", cpu_threads=1)
    assert_logits_close(engine.score([(PROMPT, engine.put(folder))])[0], reference, atol=1e-4, gap=1e-3)


@pytest.mark.parametrize("spelling", [".base_layer.bias", ".bias"], ids=["new", "old"])
@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
def test_b017_a_bias_that_has_no_place_is_never_ignored(
    world: World, copy: Callable[[str], Path], spelling: str, bias: str
) -> None:
    folder = copy("F01")
    change_config(folder, bias=bias)
    assert judge(folder, world.loader.spec)[1] == set() or bias != "none"
    name = f"{PREFIX}{Q0}{spelling}"
    change_tensors(folder, lambda tensors: tensors.update({name: np.ones(120, np.float32)}))
    report, failed = judge(folder, world.loader.spec)
    assert failed
    assert name in messages(report)


def test_b018_a_lora_bias_and_then_a_plain_adapter(cases: Cases, world: World, tmp_path: Path) -> None:
    saved = SavedJudge(cases.base, {"F12": {"target_modules": QV, "lora_bias": True}}, tmp_path, std=0.2)
    digest = world.put(saved.folders["F12"])
    assert_logits_close(world.score([(PROMPT, digest)])[0], saved.logits([PROMPT], "F12")[0], atol=1e-4, gap=1e-3)
    assert world.is_parity("F01", PROMPT, world.logits(("F01", PROMPT))[0])


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"enable_lora": None, "merge_weights": False}, None),
        ({"some_future_option": None, "other": [], "third": ""}, None),
        ({"bias": None}, None),
        ({"rank_pattern": None, "alpha_pattern": None}, None),
        ({"some_future_option": {"x": 1}}, "some_future_option"),
    ],
    ids=["b020_old", "b020_future", "b022_bias_null", "e7_patterns_null", "b020_live"],
)
def test_b020_b022_e7_fields_that_say_nothing_change_nothing(
    world: World, copy: Callable[[str], Path], changes: dict[str, Any], refusal: str | None
) -> None:
    folder = copy("F01")
    change_config(folder, **changes)
    report, failed = judge(folder, world.loader.spec)
    if refusal is not None:
        assert refusal in messages(report)
        return
    assert failed == set()
    assert world.put(folder) == world.digest_of["F01"]


@pytest.mark.parametrize("kind", [*(kind.value for kind in PeftType if kind is not PeftType.LORA), "lora", "", 5])
def test_b021_every_other_type_is_refused_by_its_name(
    world: World, copy: Callable[[str], Path], kind: str | int
) -> None:
    folder = copy("F01")
    change_config(folder, peft_type=kind)
    report, failed = judge(folder, world.loader.spec)
    assert "peft_type" in failed
    assert str(kind) in messages(report)


def test_b021_rests_of_adalora_are_refused_even_if_it_says_lora(world: World, copy: Callable[[str], Path]) -> None:
    folder = copy("F01")
    rests = {f"{PREFIX}{Q0}.lora_E": np.ones((8, 1), np.float32), f"{PREFIX}{Q0}.ranknum": np.ones(1, np.float32)}
    change_tensors(folder, lambda tensors: tensors.update(rests))
    report, failed = judge(folder, world.loader.spec)
    assert failed
    assert "lora_E" in messages(report)


def test_b023_a_config_without_a_type_names_what_is_absent(world: World, copy: Callable[[str], Path]) -> None:
    folder = copy("F01")
    (folder / CONFIG).write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": {"rank": 8}}))
    report, failed = judge(folder, world.loader.spec)
    assert failed == {"peft_type"}
    assert "peft_type" in messages(report)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_e1_an_adapter_that_needs_another_base_is_refused(world: World, copy: Callable[[str], Path], init: str) -> None:
    folder = copy("F01")
    change_config(folder, init_lora_weights=init)
    report, failed = judge(folder, world.loader.spec)
    assert failed == {"field_unsupported"}
    assert "init_lora_weights" in messages(report)


def test_e6_a_classifier_is_refused_by_its_task(world: World, copy: Callable[[str], Path]) -> None:
    folder = copy("F01")
    change_config(folder, task_type="SEQ_CLS", modules_to_save=["score"])
    change_tensors(folder, lambda tensors: tensors.update({f"{PREFIX}score.weight": np.ones((2, 72), np.float32)}))
    assert "task_type" in judge(folder, world.loader.spec)[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"target_modules": [f"model.layers.{n}.self_attn.{p}_proj" for n in (0, 1) for p in "qv"]},
        {"target_modules": ["q_proj", "v_proj", "query", "c_attn"]},
        {"target_modules": QV, "trainable_token_indices": [5, 6]},
    ],
    ids=["all_linear", "dotted", "absent_beside_present", "tokens"],
)
def test_e8_names_in_every_form_are_served(cases: Cases, world: World, tmp_path: Path, fields: dict[str, Any]) -> None:
    saved = SavedJudge(cases.base, {"e8": fields}, tmp_path, std=0.2)
    found = world.score([(PROMPT, world.put(saved.folders["e8"]))])[0]
    assert_logits_close(found, saved.logits([PROMPT], "e8")[0], atol=1e-4, gap=1e-3)


def test_e8_a_replicated_layer_is_refused_by_its_field(world: World, copy: Callable[[str], Path]) -> None:
    folder = copy("F01")
    change_config(folder, layer_replication=[[0, 2], [1, 2]])
    report, failed = judge(folder, world.loader.spec)
    assert failed == {"field_unsupported"}
    assert "layer_replication" in messages(report)


def test_e3_a_negative_alpha_is_what_peft_makes_of_it(cases: Cases, world: World, copy: Callable[[str], Path]) -> None:
    folder = copy("F01")
    change_config(folder, lora_alpha=-16)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(cases.base, dtype=torch.float32), folder)
    with torch.inference_mode():
        reference = model.eval()(input_ids=torch.tensor([PROMPT])).logits[0]
    assert_logits_close(world.score([(PROMPT, world.put(folder))])[0], reference, atol=1e-4, gap=1e-3)
