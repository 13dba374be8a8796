"""The reference: numpy against `transformers` on every served architecture, its comparison against plain formulas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from loraplex_engine.bases.folder import load_spec
from loraplex_engine.bases.pull import pull
from loraplex_engine.models.config import load_config
from loraplex_engine.parity.compare import Comparison, Gain
from loraplex_engine.parity.merged import MergedBase
from loraplex_engine.parity.prompts import build_prompts, find_start
from loraplex_engine.parity.reference import Reference
from loraplex_registry.peft.check import check_adapter
from support import write_adapter
from support_models import CASES, write_hf_base

PROMPTS = [[5, 9, 300, 17, 44, 3, 128, 7, 7, 61, 250, 12], [33, 1, 90]]


@pytest.mark.parametrize("case", CASES)
def test_rows_without_adapter_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    kind, changes = CASES[case]
    source = write_hf_base(tmp_path / "source", kind, **changes)
    base = pull(str(source), tmp_path / "bases")
    folder = write_adapter(tmp_path / "adapter", base)
    _, plan = check_adapter({file.name: file for file in folder.iterdir()}, load_spec(base))
    assert plan is not None
    with MergedBase(base, load_spec(base), plan, folder / "adapter_model.safetensors") as merged:
        reference = Reference(load_config(base), merged, PROMPTS * 2, [0, 0, 99, 99])
        logits = np.concatenate([part for _, part in reference.compute_logits(reference.compute_hidden())], axis=1)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in PROMPTS]).numpy()
    assert np.abs(logits[15:] - expected).max() < 1e-4
    assert np.abs(logits[:15] - expected).max() > 0.1, "the others have the adapter"


def test_a_comparison_in_parts_is_the_plain_one() -> None:
    generator = np.random.default_rng(0)
    reference = (generator.normal(size=(9, 70)) * 20).astype(np.float32)
    other = reference + generator.normal(size=reference.shape).astype(np.float32)
    comparison = Comparison(9)
    for begin in range(0, 70, 16):
        comparison.add(reference[:, begin : begin + 16], other[:, begin : begin + 16])
    p, q = (torch.from_numpy(part).double().log_softmax(-1) for part in (reference, other))
    kl = (p.exp() * (p - q)).sum(-1)
    assert comparison.max_kl == pytest.approx(float(kl.max()))
    assert comparison.mean_kl == pytest.approx(float(kl.mean()))
    assert comparison.logit_difference == pytest.approx(float(np.abs(other - reference).max()))
    assert comparison.rms == pytest.approx(float(np.sqrt(np.square(other - reference).mean())), rel=1e-5)
    assert comparison.is_finite


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_told_and_leave_the_rest_finite(value: float) -> None:
    comparison = Comparison(2)
    comparison.add(np.ones((2, 3), np.float32), np.array([[1, value, 1], [1, 1, 1]], np.float32))
    assert not comparison.is_finite
    assert np.isfinite([comparison.max_kl, comparison.logit_difference, comparison.rms]).all()


def test_prompts_hold_what_the_adapter_looks_for() -> None:
    texts = [[1, 2, 3, 4, 5, 6], [], [7, 8, 9]]
    prompts = build_prompts(texts, [50, 51], [60, 61, 62], max_len=100)
    assert prompts == [[1, 2, 50, 51, 60, 62, 3, 4, 5, 6], [7, 50, 51, 61, 8, 9]]
    assert [find_start(prompt, [50, 51]) for prompt in prompts] == [2, 1]
    assert build_prompts(texts, [], [], max_len=4) == [[1, 2, 3, 4], [7, 8, 9]]
    assert find_start([5, 6, 5, 6, 7], [5, 6]) == 2
    assert find_start([5], []) == 0
    assert max(map(len, build_prompts(texts, [50], list(range(1000)), max_len=12))) <= 12


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 2.0])
def test_the_gain_tells_the_scale_of_a_change_in_noise_as_large(scale: float) -> None:
    generator = np.random.default_rng(0)
    plain, effect, noise = generator.normal(size=(3, 20, 500)).astype(np.float32)
    gain = Gain()
    for begin in range(0, 500, 64):
        part = np.s_[:, begin : begin + 64]
        gain.add(plain[part], (plain + effect)[part], (plain + scale * effect + noise)[part])
    assert gain.value == pytest.approx(scale, abs=0.05)
    assert Gain().value == 1.0
