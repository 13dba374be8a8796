"""The kernels against the naive form in float64, interpreted."""

from __future__ import annotations

import os
import random

import pytest
import torch

from loraplex_engine.core.request import NO_SLOT
from loraplex_engine.ops.lora import naive, triton_form
from loraplex_engine.ops.lora.segment import SegmentBuffers, build_segments
from support_lora import MIXED, SMOLLM2, assert_true, inside_nan, make_step, pick_slots, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
# what takes minutes
IS_LONG = os.environ.get("LORAPLEX_TEST_LONG") == "1"
POPULARITIES = ["identical", "uniform", "skewed", "distinct"]
RANKS = [1, 4, 8, 16, 17, 64, 128, 256, MIXED]


def check(step):
    x, y = step.inputs()
    before, truth = y.clone(), step.truth(x, y)
    triton_form.lora_add(x, y, step.table, 0, step.group, step.segments)
    assert_true(y, before, truth, step)


@dtypes
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("rows", [1, 7])
def test_agrees_with_naive(dtype, rank, popularity, rows):
    check(make_step(pick_slots(popularity, rows), dtype, rank, "o"))


@dtypes
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("rows", [16, 35, *([1000] if IS_LONG else [])])
def test_more_rows_than_a_chunk_agree_with_naive(dtype, popularity, rows):
    check(make_step(pick_slots(popularity, rows), dtype, MIXED if IS_LONG else 8, "o"))


@dtypes
@pytest.mark.parametrize("group", ["qkv", "gate_up", "down", "head"])
def test_every_group_agrees_with_naive(dtype, group):
    check(make_step([NO_SLOT, 4, 0, 3, 1, NO_SLOT, 1], dtype, MIXED, group))


@dtypes
def test_embedding_takes_one_plane_of_gathered_ranks(dtype):
    step = make_step([1, 0, NO_SLOT, 1, 2], dtype, MIXED, "embedding")
    token_ids = torch.tensor([5, 330, 7, 0, 8])
    _, y = step.inputs()
    before, truth = y.clone(), y.double()
    v = torch.full((4, step.table.max_rank), torch.nan)
    wide = v.double()
    begin = 0
    for slot, rows in step.segments.spans():
        a = step.table.find_module(slot, 0, "embedding", 0).a
        v[begin : begin + len(rows), : a.shape[1]] = a[token_ids[rows]].float()
        wide[begin : begin + len(rows), : a.shape[1]] = a[token_ids[rows]].double()
        begin += len(rows)
    triton_form.lora_expand(v, y, step.table, 0, "embedding", step.segments)
    naive.lora_expand(wide, truth, step.truth_table, 0, "embedding", step.segments)
    assert_true(y, before, truth, step)


@dtypes
@pytest.mark.parametrize("group", ["qkv", "down"])
def test_real_shapes_agree_with_naive(dtype, group):
    check(make_step([0, NO_SLOT, *[1] * 17], dtype, 16, group, SMOLLM2, max_rank=64))


@pytest.mark.skipif(not IS_LONG, reason="LORAPLEX_TEST_LONG=1")
def test_real_head_agrees_with_naive():
    check(make_step([NO_SLOT, 1], torch.bfloat16, 8, "head", SMOLLM2, max_rank=64))


def test_a_row_of_an_empty_slot_is_never_a_row_of_the_base():
    step = make_step([0, NO_SLOT, 0, 1], torch.float32, 4)
    x, y = step.inputs()
    before = y.clone()
    step.table.clear(0)
    triton_form.lora_add(x, y, step.table, 0, "qkv", step.segments)
    assert torch.isnan(y[[0, 2]]).all()
    assert same_bits(y[1], before[1])
    assert torch.isfinite(y[3]).all()


@pytest.mark.parametrize("bucket", [None, 30])
def test_buffers_that_are_filled_again_serve_the_kernels(bucket):
    buffers = SegmentBuffers(64, 8, "cpu")
    addresses = set()
    for _ in range(3):
        step = make_step(random.choices([NO_SLOT, 0, 1, 5], k=23), torch.float32, 4)
        segments = buffers.fill(step.slots, bucket)
        addresses.add((segments.token_indices.data_ptr(), segments.chunks.data_ptr()))
        x, y = step.inputs()
        before, truth = y.clone(), step.truth(x, y)
        triton_form.lora_add(x, y, step.table, 0, "qkv", segments)
        assert_true(y, before, truth, step)
    assert len(addresses) == 1


@dtypes
@pytest.mark.parametrize("group", ["qkv", "down"])
def test_bits_of_a_row_are_the_same_alone_and_in_any_mix(dtype, group):
    slots = [0, 1, 2, 3, 4, 5, NO_SLOT, 1]
    step = make_step(slots, dtype, 20, group)
    x, y = step.inputs()
    alone = y.clone()
    for row, slot in enumerate(slots):
        segments = build_segments([slot])
        if segments is not None:
            triton_form.lora_add(x[row : row + 1], alone[row : row + 1], step.table, 0, group, segments)
    for size in (2, 5, 18):
        rows = [2, *random.choices(range(len(slots)), k=size - 1)]
        mixed = inside_nan(y[rows])
        segments = build_segments([slots[row] for row in rows])
        triton_form.lora_add(inside_nan(x[rows]), mixed, step.table, 0, group, segments)
        assert same_bits(mixed, alone[rows])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("spoiled", ["x", "a", "b", "g"])
def test_what_is_not_finite_stays_with_its_own_rows(spoiled):
    step = make_step([0, 1, NO_SLOT, 2, 1, 0], torch.bfloat16, 17)
    x, y = step.inputs()
    clean = y.clone()
    triton_form.lora_add(x, clean, step.table, 0, "qkv", step.segments)
    if spoiled == "x":
        x[[1, 4]] = torch.nan
    else:
        for i_slice in range(3):
            tensor = getattr(step.table.find_module(1, 0, "qkv", i_slice), spoiled)
            tensor.fill_(torch.inf)
    triton_form.lora_add(x, y, step.table, 0, "qkv", step.segments)
    assert not torch.isfinite(y[[1, 4]]).any()
    assert same_bits(y[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])
