"""The native ops refuse what would make them read or write outside their tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loraplex_engine.ops.lora.segment import build_segments
from loraplex_engine.ops.sampling.row import SamplingRow

F32 = torch.float32


@pytest.fixture
def batch(history, paged):
    return paged([(history(40, 4, 2, 8, F32), 38, 40), (history(7, 4, 2, 8, F32), 0, 7)])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("context_len", torch.tensor([40, 90], dtype=torch.int32), "needs 6 blocks"),
        ("context_len", torch.tensor([1, 7], dtype=torch.int32), "more rows than context"),
        ("query_start", torch.tensor([0, 2, 8], dtype=torch.int32), "cover all rows"),
        ("block_tables", torch.full((2, 6), 999, dtype=torch.int32), "names block 999"),
        ("block_tables", torch.full((2, 6), -1, dtype=torch.int32), "names block -1"),
        ("q", torch.zeros(9, 32, dtype=torch.bfloat16), "k_cache must be"),
        ("q", torch.zeros(9, 30), "q has 30 columns"),
        ("q", torch.zeros(32, 9).T, "contiguous"),
    ],
)
def test_attention_refuses_what_lies_outside(native, batch, field, value, message):
    broken = dataclasses.replace(batch, **{field: value})
    with pytest.raises(RuntimeError, match=message):
        native(F32).paged_attention(*broken.arguments(), 1.0, None)


@pytest.mark.parametrize(("positions", "cells"), [([9], [0]), ([-1], [0]), ([0], [8]), ([0], [-1])])
def test_rope_refuses_positions_and_cells_outside(native, positions, cells):
    caches = [torch.zeros(4, 2, 1, 4) for _ in range(2)]
    with pytest.raises(RuntimeError, match="is outside"):
        native(F32).rope_and_store(
            torch.zeros(1, 16), torch.tensor(positions), torch.zeros(9, 4), *caches, torch.tensor(cells), 2, 1
        )
    assert not caches[0].any()


def test_norms_and_linears_refuse_weights_that_do_not_fit(native):
    ops, x = native(F32), torch.zeros(3, 8)
    for weight, message in (
        (torch.zeros(2, 8), "2 rows, not 3"),
        (torch.zeros(3, 7), "7 entries"),
        (torch.zeros(8, 3).T, "contiguous"),
        (torch.zeros(8).bfloat16(), "must be"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.rms_norm(x, weight, 1e-5)
        with pytest.raises(RuntimeError, match=message):
            ops.add_rms_norm(x, x.clone(), weight, 1e-5)
    for q_weight, k_weight in ((torch.zeros(2, 2), torch.zeros(2)), (torch.zeros(2), torch.zeros(3, 3))):
        with pytest.raises(RuntimeError, match=r"(rows, not 3|3 entries)"):
            ops.head_rms_norm(x, q_weight, k_weight, 1e-5, 2, 1)
    with pytest.raises(RuntimeError, match="x has 8 columns, weight has 7"):
        ops.plain_linear(x, torch.zeros(5, 7))


def test_packed_linear_refuses_what_does_not_fit(native):
    native(F32)
    ops = torch.ops.loraplex
    x, packed = torch.zeros(3, 8), ops.pack_linear(torch.zeros(50, 8))
    for arguments, message in (
        ((x, packed, None, 49 + 48), "no weight of 97 x 8"),
        ((torch.zeros(3, 9), packed, None, 50), "no weight of 50 x 9"),
        ((x.bfloat16(), packed, None, 50), "must be"),
        ((x, packed, torch.zeros(49), 50), "bias has 49 entries"),
        ((x.T, packed, None, 50), "contiguous"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.packed_linear(*arguments)
    with pytest.raises(RuntimeError, match="empty"):
        ops.pack_linear(torch.zeros(5, 0))


def test_lora_refuses_rows_and_widths_outside(native, adapter, lora_table):
    table = lora_table(2, F32)
    adapter({"q_proj": 4}, F32).put(table, 0)
    x, y = torch.zeros(3, 37), torch.zeros(3, 86)
    add, good = native(F32).lora_add, build_segments([0, 0, -1])
    with pytest.raises(RuntimeError, match="x has 36 columns"):
        add(x[:, :36].contiguous(), y, table, 0, "qkv", good)
    with pytest.raises(RuntimeError, match="y has 85 columns"):
        add(x, y[:, :85].contiguous(), table, 0, "qkv", good)
    with pytest.raises(RuntimeError, match="no such place"):
        add(x, y, table, 1, "qkv", good)
    with pytest.raises(IndexError, match="slot 1 is empty"):
        add(x, y, table, 0, "qkv", build_segments([1, 0, 0]))
    outside = dataclasses.replace(good, token_indices=torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"token_indices\[1\] = 3"):
        add(x, y, table, 0, "qkv", outside)


def test_sampling_refuses_ids_outside_the_vocabulary_and_lists_that_do_not_fit(native):
    choose, logits = native(F32).choose_tokens, torch.zeros(2, 50)
    for bad in (-1, 50):
        ids = torch.tensor([0, bad])
        with pytest.raises(RuntimeError, match="outside"):
            choose(logits, [SamplingRow(), SamplingRow(edit_ids=ids, edit_values=torch.zeros(2))])
        with pytest.raises(RuntimeError, match="outside"):
            choose(logits, [SamplingRow(seen_ids=ids, seen_counts=torch.zeros(2)), SamplingRow()])
    with pytest.raises(RuntimeError, match="must have one value per id"):
        choose(logits, [SamplingRow(edit_ids=torch.tensor([0]), edit_values=torch.zeros(2)), SamplingRow()])
    with pytest.raises(RuntimeError, match="a bit per token"):
        choose(logits, [SamplingRow(), SamplingRow(allowed=torch.ones(1, dtype=torch.int32))])
    with pytest.raises(RuntimeError, match="entries"):
        choose(logits, [SamplingRow()])
    with pytest.raises(RuntimeError, match="no columns"):
        native(F32).choose_greedy(torch.empty(2, 0))


@pytest.mark.parametrize(
    "field", [{"temperature": float("nan")}, {"temperature": -1.0}, {"top_p": -0.1}, {"min_p": 1.1}, {"number": 1.0}]
)
def test_sampling_refuses_settings_that_leave_no_token(native, field):
    with pytest.raises(RuntimeError, match="row 1 is out of range"):
        native(F32).choose_tokens(torch.zeros(2, 50), [SamplingRow(), SamplingRow(**field)])


def test_scores_refuse_tokens_outside_the_vocabulary(native):
    score, logits = native(F32).score_tokens, torch.zeros(2, 50)
    for token_ids, num_top, message in (
        (torch.tensor([0, 50]), 1, "is outside"),
        (torch.tensor([-1, 0]), 1, "is outside"),
        (torch.tensor([0]), 1, "one per row"),
        (torch.tensor([0, 1], dtype=torch.int32), 1, "must be"),
        (torch.tensor([0, 1]), -1, "num_top is -1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            score(logits, token_ids, num_top)
