"""The definition of every dense op, in plain torch, for any float dtype including float64.

Slow on purpose: loops where loops are clearer. Knows nothing about devices or speed; every other form is tested
against these functions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half-width dtypes are computed in float32, the others in their own width."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `norm.rms_norm`."""
    wide = x.to(_accumulate_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # rounded before the weight is applied, as transformers does
    return (wide * scale).to(x.dtype) * weight


def plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `linear.plain_linear`."""
    wide = _accumulate_dtype(x.dtype)
    return (x.to(wide) @ weight.to(wide).T).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `norm.add_rms_norm`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def head_rms_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, num_heads: int, num_kv_heads: int
) -> None:
    """See `norm.head_rms_norm`."""
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
    q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    # one gain for every head of a row
    q.copy_(rms_norm(q, q_weight.unsqueeze(-2), eps))
    k.copy_(rms_norm(k, k_weight.unsqueeze(-2), eps))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `activation.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.to(_accumulate_dtype(gate.dtype))
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def _rotate(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate `heads` [T, n, D] by `cos_sin` [T, D], whose halves are the cosines and the sines."""
    wide = heads.to(_accumulate_dtype(heads.dtype))
    cos, sin = cos_sin.to(wide.dtype).unsqueeze(1).chunk(2, dim=-1)
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(heads.dtype)


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cells: Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """See `rotary.rope_and_store`."""
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = cos_sin[positions]
    k_cache.flatten(0, 1)[cells] = _rotate(k, angles)
    v_cache.flatten(0, 1)[cells] = v
    return _rotate(q, angles).flatten(1)


def _gather(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first `length` positions of one request, [length, G, D]; nothing past the length is read."""
    positions = torch.arange(length, device=cache.device)
    block_size = cache.shape[1]
    blocks = block_table.long()[positions // block_size]
    return cache.flatten(0, 1)[blocks * block_size + positions % block_size]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Softmax attention of one row, q [H, D] over k, v [n, G, D] -> [H, D]."""
    wide = _accumulate_dtype(q.dtype)
    group = q.shape[0] // k.shape[1]
    k, v = (t.to(wide).repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("hd,nhd->hn", q.to(wide), k) * scale
    return torch.einsum("hn,nhd->hd", torch.softmax(scores, dim=-1), v).to(q.dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """See `attention.paged_attention`."""
    head_dim = k_cache.shape[-1]
    out = torch.empty_like(q)
    starts = query_start.tolist()
    for i, length in enumerate(context_len.tolist()):
        k, v = _gather(k_cache, block_tables[i], length), _gather(v_cache, block_tables[i], length)
        for row in range(starts[i], starts[i + 1]):
            end = length - (starts[i + 1] - row) + 1
            begin = 0 if window is None else max(0, end - window)
            heads = q[row].view(-1, head_dim)
            out[row] = _attend(heads, k[begin:end], v[begin:end], scale).flatten()
    return out
