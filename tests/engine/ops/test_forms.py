"""Every form of every op against the naive form in float64."""

from __future__ import annotations

import random

import pytest
import torch

from loraplex_engine.core.module_group import LAYER_GROUPS
from loraplex_engine.ops import naive
from loraplex_engine.ops.lora import naive as lora_naive
from loraplex_engine.ops.lora.segment import build_segments

pytestmark = pytest.mark.pairs
DTYPES = [torch.float32, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
# rows, and widths below, at and beside a multiple of the vector width
shapes = pytest.mark.parametrize(("rows", "width"), [(1, 16), (7, 37), (133, 576), (3, 1), (0, 24)])


@dtypes
@shapes
def test_norms_agree_with_naive(kernels, assert_close, dtype, rows, width):
    x, residual, weight = (torch.randn(*s).to(dtype) for s in ((rows, width), (rows, width), (width,)))
    ops, total = kernels(dtype), x + residual
    if rows == 0:
        assert ops.rms_norm(x, weight, 1e-5).shape == (0, width)
        return
    assert_close(ops.rms_norm(x, weight, 1e-5), naive.rms_norm(x.double(), weight.double(), 1e-5))
    assert_close(ops.add_rms_norm(x, residual, weight, 1e-5), naive.rms_norm(total.double(), weight.double(), 1e-5))
    assert torch.equal(residual, total)


@dtypes
def test_norms_in_bf16_round_where_naive_rounds(kernels, dtype):
    x, weight = torch.randn(64, 576).to(dtype), torch.randn(576).to(dtype)
    ours, truth = kernels(dtype).rms_norm(x, weight, 1e-5), naive.rms_norm(x, weight, 1e-5)
    assert (ours == truth).float().mean() > (0.99 if dtype is torch.bfloat16 else 0.3)


@dtypes
@pytest.mark.parametrize("dim", [4, 24, 64])
def test_head_rms_norm_agrees_with_naive(kernels, assert_close, dtype, dim):
    qkv, q_weight, k_weight = (torch.randn(*s).to(dtype) for s in ((5, (4 + 2 * 2) * dim), (dim,), (dim,)))
    truth = qkv.double()
    naive.head_rms_norm(truth, q_weight.double(), k_weight.double(), 1e-6, 4, 2)
    values = qkv[:, 6 * dim :].clone()
    kernels(dtype).head_rms_norm(qkv, q_weight, k_weight, 1e-6, 4, 2)
    assert_close(qkv, truth)
    assert torch.equal(qkv[:, 6 * dim :], values)


@dtypes
@shapes
def test_silu_and_mul_agrees_with_naive(kernels, assert_close, dtype, rows, width):
    gate_up = 6 * torch.randn(rows, 2 * width).to(dtype)
    result = kernels(dtype).silu_and_mul(gate_up)
    assert result.shape == (rows, width)
    if rows:
        assert_close(result, naive.silu_and_mul(gate_up.double()))


@dtypes
def test_silu_is_right_at_its_ends(kernels, dtype):
    gate = torch.tensor([-1000.0, -88.0, -20.0, -0.0, 20.0, 88.0, 1000.0]).to(dtype)
    result = kernels(dtype).silu_and_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))[0]
    truth = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(result.double(), truth, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-30)


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 1, 24), (2, 2, 6), (3, 1, 80)])
def test_rope_and_store_agrees_with_naive(kernels, assert_close, dtype, heads, kv_heads, dim):
    rows = 29
    qkv, cos_sin = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype), torch.randn(50, dim)
    positions, cells = torch.randint(50, (rows,)), torch.randperm(40)[:rows]
    caches, truths = ([torch.zeros(10, 4, kv_heads, dim, dtype=t) for _ in range(2)] for t in (dtype, torch.float64))
    q = kernels(dtype).rope_and_store(qkv, positions, cos_sin, *caches, cells, heads, kv_heads)
    q_truth = naive.rope_and_store(qkv.double(), positions, cos_sin.double(), *truths, cells, heads, kv_heads)
    assert_close(q, q_truth)
    assert_close(caches[0], truths[0])
    assert torch.equal(caches[1].double(), truths[1])


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 1, 24), (2, 2, 6), (3, 1, 80), (72, 1, 16)])
@pytest.mark.parametrize("window", [None, 1, 70], ids=["causal", "window1", "window70"])
def test_paged_attention_agrees_with_naive(kernels, history, paged, assert_close, dtype, heads, kv_heads, dim, window):
    lengths = [(0, 1), (63, 64), (64, 65), (0, 133), (100, 117), (199, 200)]
    chunks = [(history(end, heads, kv_heads, dim, dtype), begin, end) for begin, end in lengths]
    batch = paged(chunks, block_size=16)
    truth = naive.paged_attention(*batch.double(), scale=dim**-0.5, window=window)
    assert_close(kernels(dtype).paged_attention(*batch.arguments(), dim**-0.5, window), truth)


@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 32), (3, 3, 18), (8, 1, 48)])
@pytest.mark.parametrize("window", [None, 2, 51, 64, 65, 333])
def test_chunks_that_end_anywhere_agree_with_naive(
    kernels, history, paged, assert_close, dtype, heads, kv_heads, dim, window
):
    chunks = []
    for length in (1, 2, 63, 64, 65, 127, 130, 1000):
        past = history(length, heads, kv_heads, dim, dtype)
        chunks += [
            (past, begin, length) for begin in {0, length // 2, max(0, length - 33), length - 1} if begin >= length - 90
        ]
    batch = paged(chunks, block_size=16)
    truth = naive.paged_attention(*batch.double(), scale=dim**-0.5, window=window)
    assert_close(kernels(dtype).paged_attention(*batch.arguments(), dim**-0.5, window), truth)


@dtypes
@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
def test_paged_attention_serves_any_block_size(kernels, history, paged, assert_close, dtype, block_size):
    chunks = [(history(n, 4, 2, 32, dtype), n - 3, n) for n in (3, 70, 131)]
    batch = paged(chunks, block_size)
    assert_close(
        kernels(dtype).paged_attention(*batch.arguments(), 0.2, None), naive.paged_attention(*batch.double(), 0.2, None)
    )


@dtypes
def test_paged_attention_survives_huge_and_tiny_scores(kernels, history, paged, assert_close, dtype):
    past = history(200, 3, 1, 32, dtype)
    past.k[:100] *= 60
    batch = paged([(past, 150, 200)])
    assert_close(
        kernels(dtype).paged_attention(*batch.arguments(), 0.05, None),
        naive.paged_attention(*batch.double(), 0.05, None),
    )


def test_paged_attention_shows_what_is_not_finite(kernels, history, paged):
    past = history(40, 2, 1, 16, torch.float32)
    past.k[3, 0, 0] = torch.nan
    out = kernels(torch.float32).paged_attention(*paged([(past, 0, 40)]).arguments(), 0.25, None)
    assert out[3:].isnan().all()


@dtypes
@pytest.mark.parametrize("hidden", [4, 5, 70])
@pytest.mark.parametrize("window", [None, 6, 7])
def test_native_attention_hides_what_a_row_may_not_see(native, history, paged, dtype, hidden, window):
    past = history(90, 4, 2, 16, dtype)
    past.k[hidden, 0, 0] = past.v[hidden, 1, 3] = torch.nan
    out = native(dtype).paged_attention(*paged([(past, 0, 90)]).arguments(), 0.25, window)
    is_clean = torch.ones(90, dtype=torch.bool)
    is_clean[hidden : None if window is None else hidden + window] = False
    assert torch.isfinite(out[is_clean]).all()
    assert out[~is_clean].isnan().any(dim=-1).all()


POPULARITY = {
    "identical": lambda rows: [0] * rows,
    "uniform": lambda rows: [row % 4 for row in range(rows)],
    "skewed": lambda rows: random.choices([0, 1, 2, 3], weights=[27, 9, 3, 1], k=rows),
    "distinct": lambda rows: list(range(rows)),
    "with_base": lambda rows: [row % 3 - 1 for row in range(rows)],
}
MIXED = 0


@dtypes
@pytest.mark.parametrize("rank", [1, 4, 8, 16, 64, MIXED])
@pytest.mark.parametrize("popularity", [*POPULARITY])
@pytest.mark.parametrize("rows", [1, 7, 63, 133])
def test_lora_agrees_with_naive(kernels, adapter, lora_table, assert_close, dtype, rank, popularity, rows):
    slots = POPULARITY[popularity](rows)
    slots = [slot if slot < 12 else slot % 12 for slot in slots]
    table, wide = lora_table(14, dtype), lora_table(14, torch.float64)
    for slot in {slot for slot in slots if slot >= 0}:
        one = adapter({name: rank or random.choice([0, 3, 16, 33, 64]) for name in _names()} | {"q_proj": 5}, dtype)
        one.put(table, slot)
        one.double().put(wide, slot)
    segments = build_segments(slots)
    if segments is None:
        return
    for group in LAYER_GROUPS:
        shape = table.shapes[group]
        x, y = torch.randn(rows, shape.in_features).to(dtype), torch.randn(rows, sum(shape.out_features)).to(dtype)
        truth = y.double()
        lora_naive.lora_add(x.double(), truth, wide, 0, group, segments)
        kernels(dtype).lora_add(x, y, table, 0, group, segments)
        assert_close(y, truth)


def _names() -> list[str]:
    return [name for names in LAYER_GROUPS.values() for name in names]


@dtypes
def test_shrink_keeps_float32_and_the_exact_rank(kernels, adapter, lora_table, dtype):
    table, one = lora_table(2, dtype), adapter({"q_proj": 3, "v_proj": 20}, dtype)
    one.put(table, 1)
    x = torch.randn(2, 37).to(dtype)
    v = kernels(dtype).lora_shrink(x, table, 0, "qkv", build_segments([-1, 1]))
    assert v.dtype is torch.float32
    assert v.shape == (1, 3 * 64)
    for column, rank, i_slice in ((0, 3, 0), (128, 20, 2)):
        truth = x[1].double() @ one.modules["qkv", i_slice].a.double().T
        tolerance = 1e-4 if dtype is torch.float32 else 5e-2
        torch.testing.assert_close(v[0, column : column + rank].double(), truth, rtol=tolerance, atol=tolerance)


RANKS = [0, 1, 2, 3, 5, 15, 16, 17, 31, 63, 64, 65, 100, 128, 129, 200, 255, 256]


@dtypes
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("vectors", ["", "g", "c", "gc"])
def test_every_rank_and_epilogue_agrees_with_naive(kernels, adapter, lora_table, assert_close, dtype, rank, vectors):
    table, wide = (lora_table(4, t, max_rank=256) for t in (dtype, torch.float64))
    for slot, modules in enumerate(([*_names(), "lm_head", "embed_tokens"], ["k_proj", "up_proj", "lm_head"])):
        one = adapter(dict.fromkeys(modules, rank) | {"o_proj": 7, "embed_tokens": rank or 1}, dtype, vectors)
        one.put(table, slot)
        one.double().put(wide, slot)
    table.clear(3)
    segments = build_segments([1, -1, 0, 1, 1, 0, -1, 1, 1])
    for group in (*LAYER_GROUPS, "head"):
        shape = table.shapes[group]
        x, y = torch.randn(9, shape.in_features).to(dtype), torch.randn(9, sum(shape.out_features)).to(dtype)
        truth = y.double()
        lora_naive.lora_add(x.double(), truth, wide, 0, group, segments)
        kernels(dtype).lora_add(x, y, table, 0, group, segments)
        assert_close(y, truth)
    v, y = torch.full((7, 256), torch.nan), torch.randn(9, 37).to(dtype)
    for begin, (slot, rows) in zip(segments.starts.tolist(), segments.spans(), strict=False):
        a = table.find_module(slot, 0, "embedding", 0).a
        v[begin : begin + len(rows), : a.shape[1]] = a[rows].float()
    truth = y.double()
    lora_naive.lora_expand(v.double(), truth, wide, 0, "embedding", segments)
    kernels(dtype).lora_expand(v, y, table, 0, "embedding", segments)
    assert_close(y, truth)


@dtypes
@pytest.mark.parametrize("spoiled", [torch.inf, 1.0], ids=["infinite", "finite"])
def test_rows_without_a_module_keep_their_bits(kernels, adapter, lora_table, dtype, spoiled):
    table = lora_table(3, dtype)
    adapter({"k_proj": 4}, dtype, "gc").put(table, 0)
    adapter({"q_proj": 4}, dtype).put(table, 1)
    adapter({"down_proj": 4}, dtype, "g").put(table, 2)
    x, y = torch.randn(6, 37).to(dtype), torch.randn(6, 86).to(dtype)
    y[:, ::3] = -0.0
    y[:, 1::9] = spoiled
    before = y.clone()
    kernels(dtype).lora_add(x, y, table, 0, "qkv", build_segments([0, -1, 2, 1, 0, 2]))
    bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
    changed = y.view(bits) != before.view(bits)
    assert not changed[[1, 2, 5]].any()
    assert not changed[[0, 4]][:, :50].any()
    assert not changed[[0, 4]][:, 68:].any()
    assert not changed[3, 50:].any()
    assert changed[[0, 4]][:, 51].all()
    assert changed[3, 2]


@dtypes
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 16, 130])
@pytest.mark.parametrize(("k", "columns"), [(576, 960), (37, 51), (64, 3), (1, 1), (70, 4099)])
def test_plain_linear_agrees_with_naive(kernels, assert_close, dtype, rows, k, columns):
    x, weight = torch.randn(rows, k).to(dtype), torch.randn(columns, k).to(dtype)
    y = kernels(dtype).plain_linear(x, weight)
    assert y.shape == (rows, columns)
    assert y.dtype is dtype
    if rows:
        assert_close(y, naive.plain_linear(x.double(), weight.double()))


@dtypes
@pytest.mark.parametrize("width", [16, 37, 576])
def test_a_gain_for_each_row_gives_the_bits_of_a_shared_one(kernels, dtype, width):
    ops, owner = kernels(dtype), torch.randint(3, (40,))
    x, residual, gains = (torch.randn(n, width).to(dtype) for n in (40, 40, 3))
    own, stream = ops.rms_norm(x, gains[owner], 1e-5), residual.clone()
    added = ops.add_rms_norm(x, stream, gains[owner], 1e-5)
    for i, gain in enumerate(gains):
        shared_stream = residual.clone()
        assert torch.equal(own[owner == i], ops.rms_norm(x, gain, 1e-5)[owner == i])
        assert torch.equal(added[owner == i], ops.add_rms_norm(x, shared_stream, gain, 1e-5)[owner == i])
        assert torch.equal(stream, shared_stream)


@dtypes
@pytest.mark.parametrize("dim", [4, 24, 64])
def test_a_gain_for_each_row_of_heads_gives_the_bits_of_a_shared_one(kernels, dtype, dim):
    ops, owner = kernels(dtype), torch.randint(3, (40,))
    qkv, q_gains, k_gains = (torch.randn(*s).to(dtype) for s in ((40, 8 * dim), (3, dim), (3, dim)))
    own = qkv.clone()
    ops.head_rms_norm(own, q_gains[owner], k_gains[owner], 1e-6, 4, 2)
    for i in range(3):
        shared = qkv.clone()
        ops.head_rms_norm(shared, q_gains[i], k_gains[i], 1e-6, 4, 2)
        assert torch.equal(own[owner == i], shared[owner == i])


def test_a_row_that_names_an_empty_slot_is_an_error(kernels, adapter, lora_table):
    table = lora_table(3, torch.float32)
    adapter({"q_proj": 4}, torch.float32).put(table, 1)
    adapter({"q_proj": 4}, torch.float32).put(table, 2)
    table.clear(2)
    x, y = torch.randn(2, 37), torch.zeros(2, 86)
    for slot in (0, 2):
        with pytest.raises(IndexError, match=f"slot {slot} is empty"):
            kernels(torch.float32).lora_add(x, y, table, 0, "qkv", build_segments([1, slot]))
