"""Every form of the sampling ops against the naive form, and against the distribution that it stands for."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from loraplex_engine.ops.sampling import naive
from loraplex_engine.ops.sampling.row import NO_IDS, NO_VALUES, NO_WORDS, SamplingRow

pytestmark = pytest.mark.pairs
DTYPES = [torch.float32, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
# at and beside multiples of vectors and blocks, and more than the torch form looks at first
SIZES = [1, 2, 15, 16, 17, 33, 100, 1000, 1024, 1025, 2047, 2049, 5003]
CLOSE = 1e-5
"""How near to a border of the cumulative distribution rounding may choose either side."""


def random_row(vocab: int) -> SamplingRow:
    ids = torch.randperm(vocab)[: random.choice([0, 0, 1, 5])]
    seen = torch.randperm(vocab)[: random.choice([0, 0, 1, 40])]
    return SamplingRow(
        temperature=random.choice([0.0, 1e-5, 0.1, 0.8, 1.0, 1.7, 100.0]),
        top_k=random.choice([0, 0, 0, 1, 2, 7, 50, 1500, vocab, 10**9]),
        top_p=random.choice([1.0, 1.0, 5e-324, 1e-60, 0.1, 0.5, 0.95, 0.999, 1 - 1e-12]),
        min_p=random.choice([0.0, 0.0, 1e-6, 0.01, 0.3, 1.0]),
        presence_penalty=random.choice([0.0, 0.7, -1.5]),
        frequency_penalty=random.choice([0.0, 0.3, -0.2]),
        repetition_penalty=random.choice([1.0, 1.3, 0.6]),
        number=random.choice([random.random(), random.random(), 0.0, 1 - 2**-53]),
        num_top=random.choice([None, None, 0, 1, 5, 20]),
        edit_ids=ids,
        edit_values=torch.tensor([random.choice([-100.0, -1.0, 3.0, 100.0, -math.inf]) for _ in ids]),
        seen_ids=seen,
        seen_counts=torch.randint(0, 4, (len(seen),)).float(),
        allowed=random.choice([NO_WORDS, NO_WORDS, pack(torch.rand(vocab) < random.choice([0.02, 0.5, 0.99]))]),
    )


def pack(is_allowed: torch.Tensor) -> torch.Tensor:
    """As many words as the tokens need, a bit for each."""
    bits = torch.zeros(-(-len(is_allowed) // 32) * 32, dtype=torch.int64)
    bits[: len(is_allowed)] = is_allowed
    return (bits.view(-1, 32) << torch.arange(32)).sum(dim=1).to(torch.int32)


def random_logits(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    logits = (
        torch.randn(rows, vocab) * torch.tensor([random.choice([0.0, 0.3, 3.0, 30.0]) for _ in range(rows)])[:, None]
    )
    # many equal scores, two zeros, and tokens that cannot happen
    logits = torch.where(torch.rand(rows, vocab) < 0.3, (logits * 2).round() / 2, logits)
    logits[:, 1:][torch.rand(rows, vocab - 1) < 0.1] = -math.inf
    return logits.to(dtype)


def is_border(logits: torch.Tensor, row: SamplingRow, token_id: int) -> bool:
    """Whether a hair's difference in number or filters makes this token of it."""
    near = [
        dataclasses.replace(row, number=row.number + n, top_p=row.top_p * (1 + p))
        for n in (-CLOSE, 0, CLOSE)
        for p in (-CLOSE, 0, CLOSE)
    ]
    return token_id in naive.choose_tokens(logits.expand(len(near), -1), near).token_ids.tolist()


@dtypes
@pytest.mark.parametrize("vocab", SIZES)
def test_tokens_are_those_of_the_naive_form(kernels, dtype, vocab, long):
    num_borders = 0
    for _ in range(long(5, 12)):
        logits = random_logits(16, vocab, dtype)
        rows = [random_row(vocab) for _ in range(16)]
        before = logits.clone()
        ours, truth = kernels(dtype).choose_tokens(logits, rows), naive.choose_tokens(logits, rows)
        assert torch.equal(logits, before)
        for i in torch.nonzero(ours.token_ids != truth.token_ids)[:, 0].tolist():
            assert truth.token_ids[i] >= 0
            assert is_border(logits[i], rows[i], int(ours.token_ids[i])), rows[i]
            num_borders += 1
    assert num_borders <= 2


@dtypes
@pytest.mark.parametrize("vocab", SIZES)
def test_what_is_not_allowed_is_never_chosen_and_logprobs_do_not_know_of_it(kernels, dtype, vocab):
    logits = torch.randn(24, vocab).to(dtype)
    is_allowed = [torch.rand(vocab) < 0.1 for _ in range(24)]
    for row in is_allowed:
        row[random.randrange(vocab)] = True
    rows = [
        dataclasses.replace(random_row(vocab), num_top=0, edit_ids=NO_IDS, edit_values=NO_VALUES) for _ in range(24)
    ]
    rows = [dataclasses.replace(row, allowed=pack(allowed)) for row, allowed in zip(rows, is_allowed, strict=True)]
    chosen = kernels(dtype).choose_tokens(logits, rows)
    for i, token_id in enumerate(chosen.token_ids.tolist()):
        assert is_allowed[i][token_id]
        expected = torch.log_softmax(logits[i].float(), -1)[token_id]
        torch.testing.assert_close(chosen.logprobs[i, 0], expected, atol=2e-6, rtol=2e-6)


@dtypes
def test_row_that_is_allowed_nothing_has_no_token_and_harms_no_other(kernels, dtype):
    logits = random_logits(2, 100, dtype)
    nothing, all_tokens = pack(torch.zeros(100)), pack(torch.ones(100))
    for temperature in (0.0, 1.0):
        row = SamplingRow(temperature=temperature, number=0.5)
        rows = [dataclasses.replace(row, allowed=words) for words in (nothing, all_tokens)]
        chosen = kernels(dtype).choose_tokens(logits, rows).token_ids.tolist()
        assert chosen == [-1, int(naive.choose_tokens(logits[1:], [row]).token_ids)]


@dtypes
@pytest.mark.parametrize("vocab", SIZES)
def test_logprobs_are_those_of_the_naive_form(kernels, dtype, vocab):
    for num_top in (0, 1, 5, 20):
        logits = random_logits(16, vocab, dtype)
        rows = [dataclasses.replace(random_row(vocab), num_top=random.choice([num_top, 0, None])) for _ in range(16)]
        rows[3].num_top = num_top
        ours, truth = kernels(dtype).choose_tokens(logits, rows), naive.choose_tokens(logits, rows)
        width = min(num_top, vocab)
        assert ours.logprobs.shape == (16, 1 + width)
        for i, row in enumerate(rows):
            if row.num_top is None or ours.token_ids[i] < 0:
                continue
            told = torch.cat((ours.token_ids[i : i + 1], ours.top_ids[i, : row.num_top]))
            logprobs, expected = ours.logprobs[i, : len(told)], torch.log_softmax(logits[i].double(), -1).float()
            is_possible = logprobs > -math.inf
            assert is_possible.sum() == 1 + (expected > -math.inf).sum().clamp(max=row.num_top)
            assert torch.equal(told[1:][is_possible[1:]], truth.top_ids[i, : row.num_top][is_possible[1:]])
            expected = expected[told[is_possible]]
            torch.testing.assert_close(logprobs[is_possible], expected, atol=2e-6, rtol=2e-6)


@dtypes
@pytest.mark.parametrize("vocab", SIZES)
def test_scores_of_given_tokens_are_those_of_the_naive_form(kernels, dtype, vocab):
    for num_top in (0, 1, 5, 20):
        logits, token_ids = random_logits(16, vocab, dtype), torch.randint(vocab, (16,))
        before = logits.clone()
        ours, truth = (form.score_tokens(logits, token_ids, num_top) for form in (kernels(dtype), naive))
        assert torch.equal(logits, before)
        assert (ours.logprobs.shape, ours.top_ids.shape) == (truth.logprobs.shape, truth.top_ids.shape)
        assert ours.logprobs.dtype is torch.float32
        is_possible = truth.logprobs > -math.inf
        assert torch.equal(ours.logprobs > -math.inf, is_possible)
        assert torch.equal(ours.top_ids[is_possible[:, 1:]], truth.top_ids[is_possible[:, 1:]])
        torch.testing.assert_close(ours.logprobs[is_possible], truth.logprobs[is_possible], atol=2e-6, rtol=2e-6)


@dtypes
def test_score_of_a_token_is_what_is_told_when_it_is_chosen(kernels, dtype):
    logits = random_logits(24, 2049, dtype)
    chosen = kernels(dtype).choose_tokens(logits, [SamplingRow(temperature=0.0, num_top=3)] * 24)
    scored = kernels(dtype).score_tokens(logits, chosen.token_ids, 3)
    assert torch.equal(scored.logprobs, chosen.logprobs)
    assert torch.equal(scored.top_ids, chosen.top_ids)


@dtypes
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_have_no_score_and_harm_no_other(kernels, dtype, bad):
    logits = random_logits(4, 100, dtype)
    token_ids = torch.tensor([7, 7, 7, 7])
    clean = kernels(dtype).score_tokens(logits[[0, 3]], token_ids[:2], 2)
    logits[1, 50], logits[2] = bad, -math.inf
    scored = kernels(dtype).score_tokens(logits, token_ids, 2)
    assert scored.logprobs[:, 0].isnan().tolist() == [False, True, True, False]
    assert torch.equal(scored.logprobs[[0, 3]], clean.logprobs)
    assert torch.equal(scored.top_ids[[0, 3]], clean.top_ids)


@dtypes
def test_rows_that_ask_for_none_have_no_logprobs(kernels, dtype):
    chosen = kernels(dtype).choose_tokens(torch.randn(3, 50).to(dtype), [SamplingRow()] * 3)
    assert (chosen.logprobs.shape, chosen.top_ids.shape) == ((3, 0), (3, 0))


@dtypes
@pytest.mark.parametrize("threads", [1, 2])
def test_row_is_the_same_alone_and_in_any_mix(native, dtype, threads):
    vocab, before = 3001, torch.get_num_threads()
    logits = random_logits(24, vocab, dtype)
    rows = [dataclasses.replace(random_row(vocab), num_top=3) for _ in range(24)]
    alone = [native(dtype).choose_tokens(logits[i : i + 1], rows[i : i + 1]) for i in range(24)]
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            mix = [random.randrange(24) for _ in range(random.randint(1, 24))]
            chosen = native(dtype).choose_tokens(logits[mix], [rows[i] for i in mix])
            for place, i in enumerate(mix):
                assert all(torch.equal(ours[place], own[0]) for ours, own in zip(chosen, alone[i], strict=True))
    finally:
        torch.set_num_threads(before)


def test_row_of_the_torch_form_has_the_same_token_in_any_mix(kernels):
    vocab = 1500
    logits = random_logits(24, vocab, torch.float32)
    rows = [random_row(vocab) for _ in range(24)]
    choose = kernels(torch.float32).choose_tokens
    alone = [int(choose(logits[i : i + 1], rows[i : i + 1]).token_ids) for i in range(24)]
    for _ in range(20):
        mix = [random.randrange(24) for _ in range(random.randint(1, 24))]
        assert choose(logits[mix], [rows[i] for i in mix]).token_ids.tolist() == [alone[i] for i in mix]


FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"top_p": 0.9},
    {"top_k": 8},
    {"min_p": 0.05},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.02, "temperature": 1.4},
]


@dtypes
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(kernels, dtype, filters):
    num_draws, vocab = 5000, 30
    logits = (torch.randn(1, vocab) * 2).to(dtype)
    rows = [SamplingRow(number=random.random(), **filters) for _ in range(num_draws)]
    drawn = kernels(dtype).choose_tokens(logits.expand(num_draws, -1).contiguous(), rows).token_ids
    expected = num_draws * filtered(logits[0].double(), **filters)
    counts = torch.bincount(drawn, minlength=vocab).double()
    assert counts[expected == 0].sum() == 0
    # tokens that are expected a few times in all are one class
    is_rare = expected < 5
    classes = torch.stack((counts, expected))
    classes = torch.cat((classes[:, ~is_rare], classes[:, is_rare].sum(1, keepdim=True)), dim=1)
    (counts, expected), freedom = classes, classes.shape[1] - 1
    chi_square = ((counts - expected).square() / expected.clamp(min=1)).sum()
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def filtered(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution by plain loops, the filters one after the other."""
    weights = dict(enumerate(torch.softmax(logits / temperature, -1).tolist()))
    weights = {i: w for i, w in weights.items() if w >= min_p * max(weights.values())}
    ranked = sorted(weights, key=lambda i: (-logits[i].item(), i))[: top_k or None]
    total, before, kept = sum(weights[i] for i in ranked), 0.0, {}
    for i in ranked:
        if before < top_p * total:
            kept[i] = weights[i]
        before += weights[i]
    return torch.tensor([kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))]).double()


@dtypes
def test_flat_scores_are_walked_in_the_order_of_ids(kernels, dtype):
    vocab = 20_000
    numbers = [0.0, 0.25, 0.5, 0.99999]
    for filters, kept in (
        ({"top_p": 0.9}, 18_000),
        ({"top_k": 1700}, 1700),
        ({"top_k": 3000, "top_p": 0.5}, 1500),
        ({}, vocab),
    ):
        rows = [SamplingRow(number=number, **filters) for number in numbers]
        drawn = kernels(dtype).choose_tokens(torch.zeros(4, vocab, dtype=dtype), rows).token_ids.tolist()
        assert drawn == [pytest.approx(number * kept, abs=1) for number in numbers]


@dtypes
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_p": 1e-60},
        {"top_p": 5e-324},
        {"min_p": 1.0},
        {"temperature": 1e-5},
        {"temperature": 1e-5, "top_p": 1e-60, "min_p": 1.0, "top_k": 3},
    ],
    ids=str,
)
def test_extreme_settings_leave_the_likeliest_token(kernels, dtype, filters):
    logits = torch.randperm(3000)[None].float().div(100).to(dtype)
    logits[0, 77] = 31
    for number in (0.0, 0.5, 1 - 2**-53):
        assert kernels(dtype).choose_tokens(logits, [SamplingRow(number=number, **filters)]).token_ids.tolist() == [77]


@dtypes
@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}], ids=str)
def test_lower_id_wins_among_equals(kernels, dtype, filters):
    logits = torch.zeros(1, 5000, dtype=dtype)
    logits[0, [4999, 1234, 2345]] = 2
    row = SamplingRow(number=0.9, num_top=4, **filters)
    chosen = kernels(dtype).choose_tokens(logits, [row])
    assert chosen.token_ids.tolist() == [1234]
    assert chosen.top_ids.tolist() == [[1234, 2345, 4999, 0]]
    assert kernels(dtype).choose_greedy(logits).tolist() == [1234]


@dtypes
@pytest.mark.parametrize("vocab", SIZES)
def test_greedy_is_the_first_of_the_highest(kernels, dtype, vocab):
    logits = random_logits(40, vocab, dtype)
    assert torch.equal(kernels(dtype).choose_greedy(logits), naive.choose_greedy(logits))
    rows = [SamplingRow(temperature=0.0)] * 40
    assert torch.equal(kernels(dtype).choose_tokens(logits, rows).token_ids, naive.choose_greedy(logits))


@dtypes
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_score_anywhere_makes_a_row_invalid_alone(kernels, dtype, bad):
    for vocab in (1, 16, 50, 1030):
        for place in {0, vocab // 2, vocab - 1}:
            logits = torch.randn(3, vocab).to(dtype)
            logits[1, place] = bad
            assert (kernels(dtype).choose_greedy(logits) < 0).tolist() == [False, True, False]
            for filters in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}):
                rows = [SamplingRow(num_top=2, **filters)] * 3
                chosen = kernels(dtype).choose_tokens(logits, rows)
                assert (chosen.token_ids < 0).tolist() == [False, True, False]
                assert torch.isfinite(chosen.logprobs[[0, 2]]).all()


@dtypes
def test_row_without_any_possible_token_is_invalid(kernels, dtype):
    logits = torch.full((2, 100), -math.inf, dtype=dtype)
    logits[0, 60] = -5
    banned = {"edit_ids": torch.tensor([60]), "edit_values": torch.tensor([-math.inf])}
    assert kernels(dtype).choose_greedy(logits).tolist() == [60, -1]
    for filters in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}):
        assert kernels(dtype).choose_tokens(logits, [SamplingRow(**filters)] * 2).token_ids.tolist() == [60, -1]
        assert kernels(dtype).choose_tokens(logits, [SamplingRow(**filters, **banned)] * 2).token_ids.tolist() == [
            -1,
            -1,
        ]


def test_no_rows(kernels):
    assert kernels(torch.float32).choose_greedy(torch.empty(0, 7)).shape == (0,)
    assert kernels(torch.float32).choose_tokens(torch.empty(0, 7), []).token_ids.shape == (0,)
