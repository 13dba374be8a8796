"""Saturation of a LoRA against updates whose singular values are known, and against the whole matrix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_registry.peft.check import check_adapter
from loraplex_registry.peft.saturation import Saturation, find_singular_values, measure, measure_adapter
from loraplex_registry.peft.saturation_process import SaturationAnswer, SaturationJob, answer_job
from loraplex_registry.peft.spec import AdapterPlan
from registry_world import build_tiny_spec
from support import write_adapter, write_safetensors


def build_update(values: list[float], num_out: int = 40, num_in: int = 30) -> tuple[Any, Any]:
    """A and B of a product that has exactly these singular values, mixed by a random change of basis."""
    rng = np.random.default_rng(len(values))
    rank = len(values)
    u = np.linalg.qr(rng.normal(size=(num_out, rank)))[0]
    v = np.linalg.qr(rng.normal(size=(num_in, rank)))[0]
    mix = rng.normal(size=(rank, rank)) + 2 * np.eye(rank)
    return np.linalg.inv(mix) @ v.T, u @ np.diag(values) @ mix


def judge(folder: Path, base: Any = None) -> tuple[AdapterPlan, dict[str, Path]]:
    files = {path.name: path for path in folder.iterdir()}
    report, plan = check_adapter(files, base or build_tiny_spec(), forced_base=True)
    assert plan is not None, report
    return plan, files


@pytest.mark.parametrize(
    ("values", "effective_rank", "counts"),
    [
        ([5.0, 5.0, 5.0, 5.0], 4.0, (2, 4, 4)),
        ([3.0, 0.0, 0.0, 0.0], 1.0, (1, 1, 1)),
        ([2.0, 2.0, 0.0], 2.0, (1, 2, 2)),
        ([10.0, 1.0, 0.5], 1.600, (1, 1, 2)),
    ],
)
def test_known_singular_values_give_known_figures(
    values: list[float], effective_rank: float, counts: tuple[int, ...]
) -> None:
    a, b = build_update(values)
    found = find_singular_values(a, b, -2.0)
    assert np.allclose(found, 2 * np.array(values), atol=1e-9)
    figures = measure("m", np.where(found > 1e-9, found, 0), len(values))
    assert figures.effective_rank == pytest.approx(effective_rank, abs=1e-3)
    assert figures.saturation == pytest.approx(effective_rank / len(values), abs=1e-3)
    assert (figures.mass_50, figures.mass_90, figures.mass_99) == counts
    assert figures.norm == pytest.approx(2 * np.linalg.norm(values))


@given(st.lists(st.floats(0, 1.7e308), min_size=1, max_size=16))
def test_figures_stay_in_their_ranges_whatever_the_values(values: list[float]) -> None:
    figures = measure("m", values, len(values))
    assert 0 <= figures.effective_rank <= len(values) * (1 + 1e-9)
    assert 0 <= figures.saturation <= 1 + 1e-9
    assert 0 <= figures.mass_50 <= figures.mass_90 <= figures.mass_99 <= len(values)
    assert (figures.effective_rank == 0) == (not any(values))
    msgspec.json.decode(msgspec.json.encode(figures))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_stored_adapter_has_the_singular_values_of_its_whole_updates(
    base_folder: Path, tmp_path: Path, dtype: str
) -> None:
    folder = write_adapter(
        tmp_path / "a", base_folder, rank=8, dtype=dtype, rank_pattern={"v_proj": 4}, use_rslora=True
    )
    plan, files = judge(folder)
    with files["adapter_model.safetensors"].open("rb") as file:
        found = measure_adapter(plan, file.fileno())
    assert [(one.path, one.rank) for one in found.modules] == [(one.path, one.rank) for one in plan.modules]
    rng = np.random.default_rng(0)
    for module, figures in zip(plan.modules, found.modules, strict=True):
        a = rng.normal(size=module.a.shape) * 0.2
        b = rng.normal(size=module.b.shape) * 0.2
        whole = np.linalg.svd(module.scaling * b @ a, compute_uv=False)[: module.rank]
        expected = measure(module.path, whole, module.rank)
        assert figures.effective_rank == pytest.approx(expected.effective_rank, rel=1e-2)
        assert figures.norm == pytest.approx(expected.norm, rel=1e-2)
    # random matrices use all of their rank
    assert found.num_saturated == found.num_modules == 4
    assert found.rank == 8


def test_modules_that_change_nothing_say_nothing(base_folder: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base_folder, rank=4, targets=("q_proj",))
    a, b = build_update([1.0, 1.0, 0.0, 0.0], 120, 72)
    zero = np.zeros_like(b)
    names = ("self_attn.q_proj",)
    tensors = {}
    for layer, left in ((0, b), (1, zero)):
        for name in names:
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": left}
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    plan, files = judge(folder)
    with files["adapter_model.safetensors"].open("rb") as file:
        found = measure_adapter(plan, file.fileno())
    assert found.mean_effective_rank == pytest.approx(2.0, abs=0.01)
    assert found.mean_saturation == pytest.approx(0.5, abs=0.01)
    assert (found.modules[1].norm, found.modules[1].effective_rank) == (0.0, 0.0)


def test_the_process_answers_with_figures_or_one_sentence(base_folder: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base_folder, rank=2)
    plan, files = judge(folder)
    job = SaturationJob({name: str(path) for name, path in files.items()}, build_tiny_spec(), plan.digest)
    argv = [sys.executable, "-P", "-m", "loraplex_registry.peft.saturation_process"]
    done = subprocess.run(argv, input=msgspec.json.encode(job), capture_output=True, check=True, timeout=60)
    answer = msgspec.json.decode(done.stdout, type=SaturationAnswer)
    assert isinstance(answer.saturation, Saturation)
    assert answer.saturation.num_modules == 4

    other = msgspec.structs.replace(job, digest="sha256:" + "0" * 64)
    assert answer_job(other) == SaturationAnswer(
        problem="The stored files are not those that were uploaded; tell an admin."
    )
