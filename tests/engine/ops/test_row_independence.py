"""A row's bits depend on the row alone: not on its company, its place in the batch, its chunk, or the threads."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from loraplex_engine.core.request import NO_SLOT
from loraplex_engine.ops.linear import PLAIN, PackedLinear, probe_row_invariance
from loraplex_engine.ops.lora.segment import build_segments

pytestmark = pytest.mark.pairs
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture
def mixes(long) -> range:
    """As many as are drawn."""
    return range(long(10, 25))


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def same_bits(one: Tensor, other: Tensor) -> bool:
    width = torch.int16 if one.dtype is torch.bfloat16 else torch.int32
    return torch.equal(one.contiguous().view(width), other.contiguous().view(width))


@dtypes
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"), [(9, 3, 64, None), (8, 1, 24, None), (2, 2, 6, 51), (3, 1, 80, 130)]
)
def test_attention_of_a_row_is_the_same_alone_and_in_any_mix(
    native, history, paged, dtype, heads, kv_heads, dim, window, mixes
):
    attend = native(dtype).paged_attention
    pasts = [history(n, heads, kv_heads, dim, dtype) for n in (1, 40, 64, 129, 200)]
    alone = [
        torch.cat([attend(*paged([(past, p, p + 1)]).arguments(), dim**-0.5, window) for p in range(len(past.q))])
        for past in pasts
    ]
    for _ in mixes:
        picked = random.sample(range(len(pasts)), k=random.randint(1, len(pasts)))
        spans = []
        for i in picked:
            end = random.randint(1, len(pasts[i].q))
            spans.append((i, random.choice([end - 1, random.randint(0, end - 1), 0]), end))
        batch = paged([(pasts[i], begin, end) for i, begin, end in spans], block_size=random.choice([4, 16]))
        out = attend(*batch.arguments(), dim**-0.5, window)
        assert same_bits(out, torch.cat([alone[i][begin:end] for i, begin, end in spans]))


@dtypes
def test_lora_of_a_row_is_the_same_alone_and_in_any_mix(native, adapter, lora_table, dtype, mixes):
    ops = native(dtype)
    ranks = [
        {"q_proj": 4, "down_proj": 256},
        {"q_proj": 64, "k_proj": 7, "v_proj": 33, "down_proj": 19},
        {"q_proj": 0, "v_proj": 130, "down_proj": 64},
    ]
    vectors = ["", "gc", "c"]
    adapters = [adapter({"k_proj": 1} | r, dtype, v) for r, v in zip(ranks, vectors, strict=True)]
    inputs = {group: (torch.randn(80, k).to(dtype), torch.randn(80, o).to(dtype)) for group, k, o in _GROUPS}
    choice = [random.randrange(-1, 3) for _ in range(80)]
    alone = {group: y.clone() for group, (_, y) in inputs.items()}
    table = lora_table(1, dtype, max_rank=256)
    for row, i in enumerate(choice):
        if i < 0:
            continue
        adapters[i].put(table, 0)
        for group, (x, _) in inputs.items():
            ops.lora_add(x[row : row + 1], alone[group][row : row + 1], table, 0, group, build_segments([0]))
        table.clear(0)

    for _ in mixes:
        table, slots = lora_table(6, dtype, max_rank=256), random.sample(range(6), k=3)
        for i, slot in enumerate(slots):
            adapters[i].put(table, slot)
        rows = random.sample(range(80), k=random.choice([1, 2, 5, 17, 80]))
        segments = build_segments([slots[choice[row]] if choice[row] >= 0 else NO_SLOT for row in rows])
        if segments is None:
            continue
        for group, (x, y) in inputs.items():
            fused, apart = y[rows], y[rows]
            ops.lora_add(x[rows], fused, table, 0, group, segments)
            ops.lora_expand(ops.lora_shrink(x[rows], table, 0, group, segments), apart, table, 0, group, segments)
            assert same_bits(fused, alone[group][rows])
            assert same_bits(apart, fused)


@dtypes
def test_lora_of_any_rank_is_the_same_alone_on_one_thread_and_beside_any_rank(
    native, adapter, lora_table, dtype, mixes
):
    ops, table, ranks = native(dtype), lora_table(8, dtype, max_rank=256), [1, 3, 16, 17, 64, 129, 255, 256]
    modules = ("q_proj", "k_proj", "v_proj", "down_proj")
    for slot, rank in enumerate(ranks):
        adapter(dict.fromkeys(modules, rank), dtype, "gc" if slot % 2 else "").put(table, slot)
    slots, threads = [row % 8 for row in range(48)], torch.get_num_threads()
    for group, k, o in _GROUPS:
        x, y = torch.randn(48, k).to(dtype), torch.randn(48, o).to(dtype)
        alone = y.clone()
        torch.set_num_threads(1)
        for row, slot in enumerate(slots):
            ops.lora_add(x[row : row + 1], alone[row : row + 1], table, 0, group, build_segments([slot]))
        torch.set_num_threads(threads)
        for _ in mixes:
            rows = random.sample(range(48), k=random.choice([1, 2, 3, 9, 16, 48]))
            mixed = y[rows]
            ops.lora_add(x[rows], mixed, table, 0, group, build_segments([slots[row] for row in rows]))
            assert same_bits(mixed, alone[rows])


_GROUPS = (("qkv", 37, 86), ("down", 67, 600))


@dtypes
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_adapter_that_is_not_finite_spoils_its_own_rows_only(kernels, adapter, lora_table, dtype, value):
    table, good, bad = (
        lora_table(4, dtype),
        adapter({"q_proj": 8, "v_proj": 4}, dtype, "g"),
        adapter({"q_proj": 5, "v_proj": 5}, dtype, "gc"),
    )
    bad.fill(value)
    x, y = torch.randn(9, 37).to(dtype), torch.randn(9, 86).to(dtype)
    good.put(table, 0)
    clean = y.clone()
    kernels(dtype).lora_add(x, clean, table, 0, "qkv", build_segments([0, -1, -1, 0, -1, 0, 0, -1, -1]))
    bad.put(table, 2)
    kernels(dtype).lora_add(x, y, table, 0, "qkv", build_segments([0, 2, -1, 0, 2, 0, 0, -1, 2]))
    others = [0, 2, 3, 5, 6, 7]
    tolerance = 0 if kernels(dtype).name == "native" else 1e-1 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(y[others], clean[others], rtol=tolerance, atol=tolerance)
    assert not torch.isfinite(y[[1, 4, 8]][:, :50]).any()


@dtypes
@pytest.mark.parametrize("width", [37, 576])
def test_dense_ops_are_the_same_alone_and_in_any_mix(native, dtype, width, mixes):
    ops = native(dtype)
    x, residual, weight = (
        torch.randn(300, width).to(dtype),
        torch.randn(300, width).to(dtype),
        torch.randn(width).to(dtype),
    )
    gate_up = torch.randn(300, 2 * width).to(dtype)

    def run(rows: list[int]) -> Tensor:
        stream = residual[rows]
        added = ops.add_rms_norm(x[rows], stream, weight, 1e-5)
        return torch.cat((ops.rms_norm(x[rows], weight, 1e-5), added, stream, ops.silu_and_mul(gate_up[rows])), dim=-1)

    alone = torch.cat([run([row]) for row in range(300)])
    for _ in mixes:
        rows = random.sample(range(300), k=random.choice([1, 2, 7, 33, 300]))
        assert same_bits(run(rows), alone[rows])


@dtypes
@pytest.mark.parametrize("k", [37, 576])
def test_plain_linear_is_the_same_alone_in_any_mix_and_of_any_rows(native, dtype, k, mixes):
    multiply = native(dtype).plain_linear
    x, weight = torch.randn(90, k).to(dtype), torch.randn(203, k).to(dtype)
    alone = torch.cat([torch.cat([multiply(row, column) for column in weight.split(1)], dim=-1) for row in x.split(1)])
    for _ in mixes:
        rows, columns = (random.sample(range(n), k=random.choice([1, 2, 5, 16, n])) for n in alone.shape)
        assert same_bits(multiply(x[rows], weight[columns]), alone[rows][:, columns])


@dtypes
def test_rope_is_the_same_alone_and_in_any_mix(native, dtype, mixes):
    ops, heads, kv_heads, dim = native(dtype), 9, 3, 24
    qkv, cos_sin = torch.randn(200, 15 * dim).to(dtype), torch.randn(500, dim)
    positions = torch.randint(500, (200,))

    def run(rows: list[int]) -> Tensor:
        caches = [torch.full((50, 8, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
        cells = torch.randperm(400)[: len(rows)]
        q = ops.rope_and_store(qkv[rows], positions[rows], cos_sin, *caches, cells, heads, kv_heads)
        return torch.cat((q, *(cache.flatten(0, 1)[cells].flatten(1) for cache in caches)), dim=-1)

    alone = torch.cat([run([row]) for row in range(200)])
    for _ in mixes:
        rows = random.sample(range(200), k=random.choice([1, 3, 64, 200]))
        assert same_bits(run(rows), alone[rows])


@dtypes
@pytest.mark.parametrize(("k", "o", "bias"), [(576, 960, False), (64, 100, True), (37, 51, True), (24, 7, False)])
def test_packed_linear_is_the_same_alone_and_in_any_mix(dtype, k, o, bias, mixes):
    linear = PackedLinear(torch.randn(o, k).to(dtype), torch.randn(o).to(dtype) if bias else None)
    if linear.form is PLAIN:
        pytest.skip("this machine has no packed linear")
    assert probe_row_invariance([linear])
    x = torch.randn(130, k).to(dtype)
    alone = torch.cat([linear(row) for row in x.split(1)])
    for _ in mixes:
        rows = random.sample(range(130), k=random.choice([1, 2, 3, 15, 16, 17, 33, 64, 130]))
        assert same_bits(linear(x[rows]), alone[rows])
