"""The naive ops in float64 against formulas written out by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loraplex_engine.ops import naive
from loraplex_engine.ops.lora import naive as lora_naive
from loraplex_engine.ops.lora.segment import build_segments

F64 = torch.float64


def exact(result: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(result, truth, rtol=1e-12, atol=1e-12)


def test_rms_norm_divides_by_the_root_mean_square():
    x, weight = torch.randn(3, 7, dtype=F64), torch.randn(7, dtype=F64)
    truth = torch.stack([row / math.sqrt(sum(v * v for v in row.tolist()) / 7 + 1e-5) * weight for row in x])
    exact(naive.rms_norm(x, weight, 1e-5), truth)


def test_rms_norm_in_bf16_rounds_before_the_weight_as_transformers_does():
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(naive.rms_norm(x, weight, 1e-6), weight * normal.bfloat16())


def test_add_rms_norm_updates_the_residual_and_not_the_input():
    x, residual, weight = torch.randn(3, 8, dtype=F64), torch.randn(3, 8, dtype=F64), torch.randn(8, dtype=F64)
    total, kept = x + residual, x.clone()
    exact(naive.add_rms_norm(x, residual, weight, 1e-5), naive.rms_norm(total, weight, 1e-5))
    exact(residual, total)
    exact(x, kept)


def test_head_rms_norm_leaves_values_alone():
    qkv, q_weight, k_weight = (
        torch.randn(2, (3 + 2) * 4, dtype=F64),
        torch.randn(4, dtype=F64),
        torch.randn(4, dtype=F64),
    )
    before = qkv.clone().view(2, 5, 4)
    naive.head_rms_norm(qkv, q_weight, k_weight, 1e-6, num_heads=3, num_kv_heads=1)
    after = qkv.view(2, 5, 4)
    for head in range(4):
        exact(after[:, head], naive.rms_norm(before[:, head], q_weight if head < 3 else k_weight, 1e-6))
    exact(after[:, 4], before[:, 4])


def test_silu_and_mul_takes_the_gate_from_the_first_half():
    gate, up = torch.randn(3, 5, dtype=F64), torch.randn(3, 5, dtype=F64)
    exact(naive.silu_and_mul(torch.cat((gate, up), dim=-1)), gate * torch.sigmoid(gate) * up)


def test_rope_turns_each_pair_by_its_angle():
    dim, positions = 6, torch.tensor([4, 0, 9])
    angle = positions[:, None].double() * torch.tensor([1.0, 0.1, 0.01], dtype=F64)
    table = torch.arange(10)[:, None].double() * torch.tensor([1.0, 0.1, 0.01], dtype=F64)
    cos_sin = torch.cat((table.cos(), table.sin()), dim=-1)
    qkv = torch.randn(3, (2 + 2) * dim, dtype=F64)
    k_cache, v_cache = (torch.full((4, 2, 1, dim), torch.nan, dtype=F64) for _ in range(2))
    cells = torch.tensor([7, 2, 0])
    q = naive.rope_and_store(qkv, positions, cos_sin, k_cache, v_cache, cells, num_heads=2, num_kv_heads=1)

    heads = qkv.view(3, 4, dim)
    turned = torch.complex(heads[..., :3], heads[..., 3:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    truth = torch.cat((turned.real, turned.imag), dim=-1)
    exact(q, truth[:, :2].flatten(1))
    exact(k_cache.flatten(0, 1)[cells, 0], truth[:, 2])
    exact(v_cache.flatten(0, 1)[cells, 0], heads[:, 3])
    assert k_cache.isnan().sum() == 5 * dim


def test_paged_attention_is_causal_softmax_over_the_request(history, paged):
    one, two = history(21, 6, 2, 4, F64), history(9, 6, 2, 4, F64)
    batch = paged([(one, 17, 21), (two, 0, 9)], block_size=4)
    for window in (None, 3):
        out = naive.paged_attention(*batch.arguments(), scale=0.5, window=window).view(-1, 6, 4)
        rows = [(one, p) for p in range(17, 21)] + [(two, p) for p in range(9)]
        for row, (past, position) in enumerate(rows):
            begin = 0 if window is None else max(0, position - window + 1)
            for head in range(6):
                k, v = past.k[begin : position + 1, head // 3], past.v[begin : position + 1, head // 3]
                weights = torch.exp(0.5 * (k @ past.q[position].view(6, 4)[head]))
                exact(out[row, head], (weights / weights.sum()) @ v)


def test_lora_adds_scaled_product_to_the_rows_of_its_slot_only(adapter, lora_table):
    table, plain = lora_table(3, F64), adapter({"q_proj": 3, "v_proj": 5}, F64)
    plain.put(table, slot=1)
    adapter({"k_proj": 2}, F64).put(table, slot=2)
    x, y = torch.randn(4, 37, dtype=F64), torch.randn(4, 86, dtype=F64)
    before = y.clone()
    lora_naive.lora_add(x, y, table, 0, "qkv", build_segments([1, -1, 2, 1]))

    truth = before.clone()
    for i_slice, columns in ((0, slice(0, 50)), (2, slice(68, 86))):
        m = plain.modules["qkv", i_slice]
        truth[[0, 3], columns] += m.scaling * (x[[0, 3]] @ m.a.T) @ m.b
    m = table.find_module(2, 0, "qkv", 1)
    truth[2, 50:68] += m.scaling * (x[2] @ m.a.T) @ m.b
    exact(y, truth)


def test_dora_and_biases_scale_and_shift_the_sum_of_base_and_product(adapter, lora_table):
    table = lora_table(3, F64)
    kinds = {0: ("gc", 3), 1: ("g", 0), 2: ("c", 4)}
    for slot, (vectors, rank) in kinds.items():
        adapter({"q_proj": rank, "v_proj": 0}, F64, vectors).double().put(table, slot)
    x, y = torch.randn(4, 37, dtype=F64), torch.randn(4, 86, dtype=F64)
    truth = y.clone()
    lora_naive.lora_add(x, y, table, 0, "qkv", build_segments([1, -1, 2, 0]))
    q = [table.find_module(slot, 0, "qkv", 0) for slot in range(3)]
    v = [table.find_module(slot, 0, "qkv", 2) for slot in range(3)]
    truth[0, :50] *= q[1].g
    truth[0, 68:] *= v[1].g
    truth[2, :50] += q[2].scaling * x[2] @ q[2].a.T @ q[2].b + q[2].c
    truth[2, 68:] += v[2].c
    truth[3, :50] = q[0].g * (truth[3, :50] + q[0].scaling * x[3] @ q[0].a.T @ q[0].b) + q[0].c
    truth[3, 68:] = v[0].g * truth[3, 68:] + v[0].c
    exact(y, truth)


def test_an_embedding_is_expanded_from_the_gathered_rows_of_a(adapter, lora_table):
    table, one = lora_table(1, F64), adapter({"embed_tokens": 5}, F64, "gc").double()
    one.put(table, 0)
    m, token_ids = one.modules["embedding", 0], torch.tensor([7, 89, 7])
    v = torch.full((3, 64), torch.nan, dtype=F64)
    v[:, :5] = m.a[token_ids]
    y = torch.randn(3, 37, dtype=F64)
    one_hot = torch.nn.functional.one_hot(token_ids, 90).double()
    truth = m.g * (y + m.scaling * one_hot @ m.a @ m.b) + m.c
    lora_naive.lora_expand(v, y, table, 0, "embedding", build_segments([0, 0, 0]))
    exact(y, truth)


def test_plain_linear_is_a_product_with_the_transposed_weight():
    x, weight = torch.randn(3, 5, dtype=F64), torch.randn(4, 5, dtype=F64)
    truth = torch.stack([torch.stack([(row * column).sum() for column in weight]) for row in x])
    exact(naive.plain_linear(x, weight), truth)


def test_a_gain_for_each_row_normalises_each_row_by_its_own():
    x, weight = torch.randn(3, 8, dtype=F64), torch.randn(3, 8, dtype=F64)
    own = zip(x.split(1), weight, strict=True)
    exact(naive.rms_norm(x, weight, 1e-5), torch.cat([naive.rms_norm(row, gain, 1e-5) for row, gain in own]))
    qkv, q_weight, k_weight = (torch.randn(*s, dtype=F64) for s in ((3, 5 * 4), (3, 4), (3, 4)))
    truth = [row.clone() for row in qkv.split(1)]
    for row, q_gain, k_gain in zip(truth, q_weight, k_weight, strict=True):
        naive.head_rms_norm(row, q_gain, k_gain, 1e-6, num_heads=3, num_kv_heads=1)
    naive.head_rms_norm(qkv, q_weight, k_weight, 1e-6, num_heads=3, num_kv_heads=1)
    exact(qkv, torch.cat(truth))
