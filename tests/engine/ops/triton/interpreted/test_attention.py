"""Paged attention against the naive form in float64, interpreted; then its rows alone and in company, bit by bit."""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
import triton
import triton.language as tl

from loraplex_engine.ops import naive
from loraplex_engine.ops.triton import attention_kernel
from loraplex_engine.ops.triton.attention import paged_attention
from support_attention import make_history, page
from support_lora import same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
# what takes minutes
IS_LONG = os.environ.get("LORAPLEX_TEST_LONG") == "1"
CONTEXTS = (1, 15, 16, 17, 64, 65, 130)
GROUPS = (1, 3, 8)


def check(chunks, assert_close, window=None, block_size=16):
    batch = page(chunks, block_size)
    scale = batch.k_cache.shape[-1] ** -0.5
    assert_close(
        paged_attention(*batch.arguments(), scale, window), naive.paged_attention(*batch.double(), scale, window)
    )


def mix(contexts, group, dim, dtype, kv_heads=1):
    """Prefills up to 17 rows, chunks and decodes at several contexts, in no order."""
    chunks = []
    for context in contexts:
        past = make_history(context, group * kv_heads, kv_heads, dim, dtype)
        begins = {0, max(0, context - 5), context - 1} if context <= 17 or IS_LONG else {context - 5, context - 1}
        chunks += [(past, begin, context) for begin in sorted(begins)]
    random.shuffle(chunks)
    return chunks


@dtypes
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dim", [16, 64, 80])
@pytest.mark.parametrize("window", [None, 1, 17])
def test_prefill_chunk_and_decode_in_one_launch_agree_with_naive(assert_close, dtype, group, dim, window):
    contexts = CONTEXTS if IS_LONG else random.sample(CONTEXTS, 3)
    check(mix(contexts, group, dim, dtype, kv_heads=1 + (dim == 16)), assert_close, window)


@dtypes
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_context_agrees_with_naive(assert_close, dtype, group, context):
    check(mix([context], group, 16, dtype), assert_close)


@dtypes
def test_a_long_prefill_beside_decodes_agrees_with_naive(assert_close, dtype):
    long, short = (make_history(n, 3, 1, 16, dtype) for n in (130, 20))
    check([(short, 19, 20), (long, 0, 130), (short, 18, 19)], assert_close)


@dtypes
@pytest.mark.parametrize("dim", [8, 96, 128, 200, 256])
def test_head_dims_are_padded(assert_close, dtype, dim):
    check(mix([17, 40], 2, dim, dtype), assert_close)


@pytest.mark.parametrize("dim", [6, 264])
def test_head_dims_without_a_tile_take_the_torch_form(monkeypatch, assert_close, dim):
    monkeypatch.setattr(attention_kernel, "_paged_attention_kernel", None)
    check([(make_history(20, 2, 1, dim, torch.float32), 3, 20)], assert_close)


@dtypes
@pytest.mark.parametrize("block_size", [1, 8, 20, 256])
def test_any_block_size_is_served(assert_close, dtype, block_size):
    check(mix([17, 65], 3, 16, dtype), assert_close, window=40, block_size=block_size)


@dtypes
@pytest.mark.parametrize("group", [16, 71])
def test_a_group_of_many_heads_is_cut_up(assert_close, dtype, group):
    check([(make_history(20, 2 * group, 2, 16, dtype), begin, 20) for begin in (13, 19)], assert_close)


@dtypes
@pytest.mark.parametrize("size", [30.0, 1e-3])
def test_huge_and_tiny_scores_agree_with_naive(assert_close, dtype, size):
    past = make_history(80, 2, 1, 16, dtype)
    past.q.mul_(size)
    check([(past, 0, 80)], assert_close)


@dtypes
@pytest.mark.parametrize(("group", "dim", "window"), [(1, 64, None), (3, 16, 17), (8, 16, None), (2, 128, 40)])
def test_bits_of_a_row_are_the_same_alone_chunked_and_in_any_mix(dtype, group, dim, window, long):
    pasts = [make_history(n, group, 1, dim, dtype) for n in (1, 33, 66)]
    alone = [
        torch.cat([paged_attention(*page([(p, r, r + 1)]).arguments(), 0.2, window) for r in range(len(p.q))])
        for p in pasts
    ]
    for _ in range(20 if IS_LONG else long(2, 4)):
        spans = [(1, 0, 33)]
        for i in random.choices(range(len(pasts)), k=random.randint(1, 4)):
            end = random.randint(1, len(pasts[i].q))
            spans.append((i, random.choice([end - 1, random.randint(0, end - 1), 0]), end))
        random.shuffle(spans)
        batch = page([(pasts[i], begin, end) for i, begin, end in spans], random.choice([4, 16]))
        out = paged_attention(*batch.arguments(), 0.2, window)
        assert same_bits(out, torch.cat([alone[i][begin:end] for i, begin, end in spans]))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_finite_shows_in_its_own_request_alone():
    good, bad = (make_history(40, 2, 1, 16, torch.float32) for _ in range(2))
    clean = paged_attention(*page([(good, 30, 40)]).arguments(), 0.25, None)
    bad.v[3] = torch.nan
    out = paged_attention(*page([(bad, 30, 40), (good, 30, 40), (bad, 39, 40)]).arguments(), 0.25, None)
    assert torch.isnan(out[[*range(10), 20]]).all()
    assert same_bits(out[10:20], clean)


@dtypes
def test_nothing_in_front_of_a_window_is_read(dtype):
    past = make_history(60, 2, 1, 16, dtype)
    before = paged_attention(*page([(past, 58, 60)]).arguments(), 0.25, 6)
    past.k[:53], past.v[:53] = torch.nan, torch.nan
    assert same_bits(paged_attention(*page([(past, 58, 60)]).arguments(), 0.25, 6), before)


def test_a_bucket_serves_steps_with_fewer_rows_and_requests():
    past = make_history(40, 2, 1, 16, torch.bfloat16)
    batch = page([(past, 0, 40), (past, 39, 40)])
    expected = paged_attention(*batch.arguments(), 0.25, None)
    start = torch.cat((batch.query_start, torch.tensor([41, 41], dtype=torch.int32)))
    context_len = torch.cat((batch.context_len, torch.zeros(2, dtype=torch.int32)))
    tables = torch.cat((batch.block_tables, torch.full_like(batch.block_tables, -1)))
    q = torch.cat((batch.q, torch.full((9, 32), torch.nan, dtype=torch.bfloat16)))
    out = paged_attention(q, batch.k_cache, batch.v_cache, tables, start, context_len, 0.25, None)
    assert same_bits(out[:41], expected)
    assert torch.isnan(out[41:]).all()


@triton.jit
def _record_rows_kernel(query_start_ptr, out_ptr, num_requests, block_tokens):
    i_block = tl.program_id(0)
    request, first, end = attention_kernel._find_rows(query_start_ptr, num_requests, i_block, block_tokens)
    tl.store(out_ptr + i_block * 3, request)
    tl.store(out_ptr + i_block * 3 + 1, first)
    tl.store(out_ptr + i_block * 3 + 2, end)


@pytest.mark.parametrize("block_tokens", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("num_requests", [1, 2, 9])
def test_every_row_is_in_exactly_one_block(block_tokens, num_requests):
    sizes = random.choices([0, 1, 1, block_tokens - 1, block_tokens, block_tokens + 1, 77], k=num_requests)
    starts = [0, *itertools.accumulate(sizes)]
    blocks = torch.empty(starts[-1] // block_tokens + num_requests, 3, dtype=torch.int32)
    _record_rows_kernel[len(blocks),](torch.tensor(starts, dtype=torch.int32), blocks, num_requests, block_tokens)
    found = []
    for request, first, end in blocks.tolist():
        assert starts[request] <= first
        assert end == starts[request + 1]
        found += [(request, row) for row in range(first, min(first + block_tokens, end))]
    assert sorted(found) == [(i, row) for i, size in enumerate(sizes) for row in range(starts[i], starts[i] + size)]
