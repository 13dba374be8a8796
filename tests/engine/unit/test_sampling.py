from __future__ import annotations

import pytest
import torch

from loraplex_engine.sampling import mask_endings, sample, uniform
from loraplex_engine.wire.messages import SamplingParams


def _logits(rows: int = 1, vocab: int = 5000, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def _draw(logits: torch.Tensor, count: int, **params: float) -> list[int]:
    rows = logits.expand(count, -1)
    return sample(rows, [SamplingParams(1, seed=5, **params)] * count, range(count))  # type: ignore[arg-type]


def test_temperature_zero_is_the_highest_logit() -> None:
    logits = _logits(3)
    assert sample(logits, [SamplingParams(1, temperature=0.0)] * 3, [0, 1, 2]) == logits.argmax(-1).tolist()


def test_uniform_numbers_are_spread_evenly_and_differ_by_every_counter() -> None:
    numbers = [uniform(seed, choice, position) for seed in range(10) for choice in range(10) for position in range(100)]
    assert len(set(numbers)) == 10_000
    assert 0.49 < sum(numbers) / len(numbers) < 0.51
    counts = torch.histc(torch.tensor(numbers), bins=10, min=0, max=1)
    assert counts.min() > 900


def test_sample_depends_on_seed_choice_and_position_alone_not_on_company() -> None:
    logits = _logits(8)
    params = [SamplingParams(1, temperature=0.9, top_p=0.95, seed=seed) for seed in range(8)]
    together = sample(logits, params, range(8))
    alone = [sample(logits[i : i + 1], [params[i]], [i])[0] for i in range(8)]
    assert together == alone


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"temperature": 2.0}])
def test_samples_follow_the_filtered_distribution(params: dict[str, float]) -> None:
    logits = _logits(vocab=50)
    draws = torch.bincount(torch.tensor(_draw(logits, 4000, **params)), minlength=50) / 4000
    probabilities = torch.softmax(logits[0] / params.get("temperature", 1.0), -1)
    order = probabilities.argsort(descending=True)
    ranked = probabilities[order]
    keep = torch.ones(50, dtype=torch.bool)
    keep &= ranked.cumsum(0) - ranked < params.get("top_p", 1.0)
    keep &= torch.arange(50) < params.get("top_k", 50)
    keep &= ranked >= params.get("min_p", 0.0) * ranked[0]
    expected = torch.zeros(50)
    expected[order] = torch.where(keep, ranked, 0.0) / ranked[keep].sum()
    assert (draws - expected).abs().max() < 0.03
    assert draws[expected == 0].sum() == 0


def test_flat_distribution_with_top_p_needs_more_than_the_usual_candidates() -> None:
    draws = _draw(torch.zeros(1, 20_000), 300, top_p=0.9)
    assert max(draws) < 18_001
    assert len(set(draws)) > 290


@pytest.mark.parametrize("top_k", [1, 10**9])
def test_top_k_beyond_the_vocabulary_is_everything_and_one_is_greedy(top_k: int) -> None:
    logits = _logits(vocab=20)
    draws = set(_draw(logits, 200, top_k=top_k))
    assert draws == {int(logits.argmax())} if top_k == 1 else len(draws) > 5


def test_tiny_temperature_is_greedy_without_overflow() -> None:
    logits = _logits() * 100
    assert set(_draw(logits, 5, temperature=1e-6)) == {int(logits.argmax())}


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 1e-60},
        {"top_p": 5e-324},
        {"temperature": 1e-300},
        {"temperature": 1e-300, "top_p": 0.5},
        {"temperature": 1e-5, "top_p": 1e-60, "min_p": 1.0, "top_k": 3},
        {"min_p": 1.0},
    ],
)
def test_extreme_parameters_leave_the_first_choice_and_harm_no_neighbour(params: dict[str, float]) -> None:
    logits = _logits(3)
    rows = [SamplingParams(1, seed=1), SamplingParams(1, **params), SamplingParams(1, seed=2)]  # type: ignore[arg-type]
    tokens = sample(logits, rows, [0, 0, 0])
    assert tokens[1] == int(logits[1].argmax())
    assert [tokens[0], tokens[2]] == [sample(logits[i : i + 1], [rows[i]], [0])[0] for i in (0, 2)]


def test_masked_tokens_are_never_chosen() -> None:
    logits = _logits(vocab=4)
    mask_endings(logits, 0, [0, 1, 2])
    assert set(_draw(logits, 50)) == {3}
