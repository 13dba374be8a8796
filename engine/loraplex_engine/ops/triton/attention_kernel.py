"""Paged attention in Triton; what it computes is said in `attention.paged_attention`.

A program takes a block of rows: a few neighbouring tokens of one request with all heads of one KV head, or BLOCK_M of
them where there are more. It walks the request's keys and values once, in tiles of BLOCK_N positions anchored at
position 0, with a softmax in float32 that is corrected as larger scores turn up (Dao et al., 2022). One program walks a
whole context: nothing is split over programs, so that a few long decodes do not fill a GPU. Imported only where Triton
is installed and there is a GPU, or the interpreter in its place.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Neither alignment nor value of an argument may ask for a compilation of its own: `attention_variants` are all.
_ATTENTION_ARGUMENTS = list(range(15))


@triton.jit
def _find_rows(query_start_ptr, num_requests, i_block, block_tokens):
    """Request, first row, and end of the request's rows, for one block; one without rows begins at or past that end.

    Request `i` has the blocks from `query_start[i] // block_tokens + i` on, of which it needs one less at times: the
    numbers of rows and requests alone say how many blocks a step has, and nothing has to be laid out on the host.
    """
    # of one type with what the loop makes of it
    low, high = num_requests * 0, num_requests
    while low + 1 < high:
        middle = (low + high) // 2
        is_later = tl.load(query_start_ptr + middle) // block_tokens + middle > i_block
        low = tl.where(is_later, low, middle)
        high = tl.where(is_later, middle, high)
    begin, end = tl.load(query_start_ptr + low), tl.load(query_start_ptr + low + 1)
    return low, begin + (i_block - begin // block_tokens - low) * block_tokens, end


@triton.jit(do_not_specialize=_ATTENTION_ARGUMENTS)
def _paged_attention_kernel(
    q_ptr,  # [T, H * D]
    k_ptr,  # [B, block_size, G, D]
    v_ptr,  # as k
    out_ptr,  # [T, H * D]
    tables_ptr,  # [Q, max_blocks]
    query_start_ptr,  # [Q + 1]
    context_len_ptr,  # [Q]
    scale,  # on scores, times log2(e)
    window,
    num_requests,
    num_kv_heads,
    group,  # heads of a KV head
    head_dim,
    max_blocks,
    block_size,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (blocks of rows, KV heads x blocks of a KV head's heads)."""
    block_heads = tl.minimum(group, BLOCK_M)
    block_tokens = BLOCK_M // block_heads
    i_kv, i_part = tl.program_id(1) % num_kv_heads, tl.program_id(1) // num_kv_heads
    # the last rows of a prompt see most, so they come first
    i_block = tl.num_programs(0) - 1 - tl.program_id(0)
    i_request, first, end = _find_rows(query_start_ptr, num_requests, i_block, block_tokens)
    if first >= end:
        return
    # says that rows begin at multiples of 16 bytes; a hint says nothing about an argument
    head_dim = head_dim // 8 * 8

    o_m, o_n, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    o_row, o_head = first + o_m // block_heads, i_part * block_heads + o_m % block_heads
    m_m = (o_m < block_tokens * block_heads) & (o_row < end) & (o_head < group)
    m_d = o_d < head_dim
    o_q = (((o_row.to(tl.int64) * num_kv_heads + i_kv) * group + o_head) * head_dim)[:, None] + o_d[None, :]
    m_q = m_m[:, None] & m_d[None, :]
    p_q, p_out = tl.multiple_of(q_ptr + o_q, [1, 16]), tl.multiple_of(out_ptr + o_q, [1, 16])
    b_q = tl.load(p_q, mask=m_q, other=0.0)

    first_position = tl.load(context_len_ptr + i_request) - (end - first)
    o_position = first_position + o_m // block_heads
    # nothing is read that none of the rows sees
    kv_begin = tl.maximum(first_position + 1 - window, 0)
    kv_end = first_position + tl.minimum(block_tokens, end - first)
    p_table = tables_ptr + i_request.to(tl.int64) * max_blocks

    b_peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for base in range(kv_begin // BLOCK_N * BLOCK_N, kv_end, BLOCK_N):
        o_k = base + o_n
        m_k = (o_k >= kv_begin) & (o_k < kv_end)
        i_cell = tl.load(p_table + o_k // block_size, mask=m_k, other=0).to(tl.int64) * block_size + o_k % block_size
        o_kv = (i_cell * num_kv_heads + i_kv) * head_dim
        p_k = tl.multiple_of(k_ptr + o_kv[None, :] + o_d[:, None], [16, 1])
        b_k = tl.load(p_k, mask=m_k[None, :] & m_d[:, None], other=0.0)
        b_s = tl.dot(b_q, b_k, input_precision="ieee") * scale
        o_back = o_position[:, None] - o_k[None, :]
        b_s = tl.where((o_back >= 0) & (o_back < window), b_s, float("-inf"))

        b_new = tl.maximum(b_peak, tl.max(b_s, 1))
        # a row that sees nothing yet has no peak to subtract
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p, b_factor = tl.exp2(b_s - b_base[:, None]), tl.exp2(b_peak - b_base)
        b_total = b_total * b_factor + tl.sum(b_p, 1)
        b_peak = b_new
        p_v = tl.multiple_of(v_ptr + o_kv[:, None] + o_d[None, :], [1, 16])
        b_v = tl.load(p_v, mask=m_k[:, None] & m_d[None, :], other=0.0)
        acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * b_factor[:, None], input_precision="ieee")

    b_out = acc / tl.where(m_m, b_total, 1.0)[:, None]
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_q)
