"""The two kernels in Triton; what they compute is said in `lora.lora_shrink` and `lora.lora_expand`.

A program takes one chunk: at most BLOCK_T rows of one slot, found through the sorted list of rows. It reads the
module's addresses, rank and scaling from the table, loops over that rank alone, and writes nothing for a module that
is not there. Imported only where Triton is installed and there is a GPU, or the interpreter in its place.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Neither alignment nor value of an argument may ask for a compilation of its own: `dispatchable_variants` are all.
_SHRINK_ARGUMENTS, _EXPAND_ARGUMENTS = list(range(12)), list(range(17))


@triton.jit(do_not_specialize=_SHRINK_ARGUMENTS)
def _lora_shrink_kernel(
    x_ptr,  # [T, K]
    v_ptr,  # [planes, T_lora, slices * max_rank] float32
    rows_ptr,  # [T_lora]
    chunks_ptr,  # [C, 3]
    entries_ptr,  # [N, L, groups, slices, 5]
    features_ptr,  # [groups, slices, 3]
    slot_stride,  # entries of a slot
    place,  # of (layer, group) among the entries of a slot
    feature_place,  # of the group among the rows of features
    num_rows,
    num_slices,
    max_rank,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAM_RANKS: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Grid (chunks, slices x ranks / PROGRAM_RANKS, planes)."""
    i_slice = tl.program_id(1) % num_slices
    first_rank = tl.program_id(1) // num_slices * PROGRAM_RANKS
    i_plane, num_planes = tl.program_id(2), tl.num_programs(2)

    p_chunk = chunks_ptr + tl.program_id(0) * 3
    slot, begin, count = tl.load(p_chunk), tl.load(p_chunk + 1), tl.load(p_chunk + 2)
    p_entry = entries_ptr + (slot.to(tl.int64) * slot_stride + place + i_slice) * 5
    rank = tl.load(p_entry + 2).to(tl.int32)
    if (count == 0) | (first_rank >= rank):
        return

    a_ptr = tl.load(p_entry).to(x_ptr.dtype)
    in_features = tl.load(features_ptr + (feature_place + i_slice) * 3 + 2)
    if IS_ALIGNED:
        in_features = tl.multiple_of(in_features, 16)
    plane_features = (in_features + num_planes * BLOCK_K - 1) // (num_planes * BLOCK_K) * BLOCK_K
    k_begin = (i_plane * plane_features).to(tl.int32)
    k_end = tl.minimum(k_begin + plane_features, in_features).to(tl.int32)

    o_t = tl.arange(0, BLOCK_T)
    m_t = o_t < count
    o_row = tl.load(rows_ptr + begin + o_t, mask=m_t, other=0).to(tl.int64)
    p_v = v_ptr + ((i_plane.to(tl.int64) * num_rows + begin + o_t) * num_slices + i_slice) * max_rank

    for r in range(first_rank, tl.minimum(rank, first_rank + PROGRAM_RANKS), BLOCK_R):
        o_r = r + tl.arange(0, BLOCK_R)
        m_r = o_r < rank
        acc = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for k in range(k_begin, k_end, BLOCK_K):
            o_k = k + tl.arange(0, BLOCK_K)
            m_k = o_k < in_features
            p_x = x_ptr + o_row[:, None] * in_features + o_k[None, :]
            p_a = a_ptr + o_r[None, :] * in_features + o_k[:, None]
            if IS_ALIGNED:
                p_x, p_a = tl.multiple_of(p_x, [1, 16]), tl.multiple_of(p_a, [16, 1])
            b_x = tl.load(p_x, mask=m_t[:, None] & m_k[None, :], other=0.0)
            b_a = tl.load(p_a, mask=m_r[None, :] & m_k[:, None], other=0.0)
            acc = tl.dot(b_x, b_a, acc, input_precision="ieee")
        tl.store(p_v[:, None] + o_r[None, :], acc, mask=m_t[:, None] & m_r[None, :])


@triton.jit
def _multiply(b_v, b_b, acc):
    """`acc + v B`; where B is half, v is multiplied in two parts that together keep twice B's digits."""
    if b_b.dtype == tl.float32:
        return tl.dot(b_v, b_b, acc, input_precision="ieee")
    b_high = b_v.to(b_b.dtype)
    acc = tl.dot(b_high, b_b, acc)
    return tl.dot((b_v - b_high.to(tl.float32)).to(b_b.dtype), b_b, acc)


@triton.jit
def _load_vector(address, o_o, width, default: tl.constexpr):
    """A float32 vector of the epilogue, `default` everywhere if there is none."""
    mask = o_o < tl.where(address != 0, width, 0)
    return tl.load(address.to(tl.pointer_type(tl.float32)) + o_o, mask=mask, other=default)


@triton.jit(do_not_specialize=_EXPAND_ARGUMENTS)
def _lora_expand_kernel(
    v_ptr,  # [planes, T_lora, slices * max_rank] float32
    y_ptr,  # [T, stride_yt]
    rows_ptr,  # [T_lora]
    chunks_ptr,  # [C, 3]
    entries_ptr,  # [N, L, groups, slices, 5]
    scalings_ptr,  # [N, L, groups, slices] float32
    occupied_ptr,  # [N] int8
    features_ptr,  # [groups, slices, 3]
    slot_stride,  # entries of a slot
    place,  # of (layer, group) among the entries of a slot
    feature_place,  # of the group among the rows of features
    num_rows,
    num_slices,
    max_rank,
    stride_yt,
    second_slice,  # the first block of columns of slice 1
    third_slice,  # and of slice 2
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PLANES: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Grid (chunks, blocks of columns of all slices)."""
    i_block = tl.program_id(1)
    i_slice = (i_block >= second_slice).to(tl.int32) + (i_block >= third_slice).to(tl.int32)
    i_block -= tl.where(i_slice == 2, third_slice, tl.where(i_slice == 1, second_slice, 0))

    p_chunk = chunks_ptr + tl.program_id(0) * 3
    slot, begin, count = tl.load(p_chunk), tl.load(p_chunk + 1), tl.load(p_chunk + 2)
    i_entry = slot.to(tl.int64) * slot_stride + place + i_slice
    p_entry = entries_ptr + i_entry * 5
    rank = tl.load(p_entry + 2).to(tl.int32)
    g_address, c_address = tl.load(p_entry + 3), tl.load(p_entry + 4)
    is_absent = (rank == 0) & (g_address == 0) & (c_address == 0)
    # NOTE: an empty slot goes on: its scaling is NaN, and its rows must not pass for rows of the base
    if (count == 0) | (is_absent & (tl.load(occupied_ptr + slot) != 0)):
        return

    b_ptr = tl.load(p_entry + 1).to(y_ptr.dtype)
    p_feature = features_ptr + (feature_place + i_slice) * 3
    first_column, width = tl.load(p_feature), tl.load(p_feature + 1)
    if IS_ALIGNED:
        first_column, width = tl.multiple_of(first_column, 16), tl.multiple_of(width, 16)

    o_t = tl.arange(0, BLOCK_T)
    m_t = o_t < count
    o_row = tl.load(rows_ptr + begin + o_t, mask=m_t, other=0).to(tl.int64)
    stride_vp = num_rows.to(tl.int64) * num_slices * max_rank
    o_o = i_block * BLOCK_O + tl.arange(0, BLOCK_O)
    m_o = o_o < width

    acc = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for r in range(0, rank, BLOCK_R):
        o_r = r + tl.arange(0, BLOCK_R)
        m_r = o_r < rank
        p_v = v_ptr + (((begin + o_t).to(tl.int64) * num_slices + i_slice) * max_rank)[:, None] + o_r[None, :]
        b_v = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for i_plane in tl.static_range(PLANES):
            b_v += tl.load(p_v + i_plane * stride_vp, mask=m_t[:, None] & m_r[None, :], other=0.0)
        p_b = b_ptr + o_r[:, None].to(tl.int64) * width + o_o[None, :]
        if IS_ALIGNED:
            p_b = tl.multiple_of(p_b, [1, 16])
        b_b = tl.load(p_b, mask=m_r[:, None] & m_o[None, :], other=0.0)
        acc = _multiply(b_v, b_b, acc)

    p_y = y_ptr + o_row[:, None] * stride_yt + first_column + o_o[None, :]
    if IS_ALIGNED:
        p_y = tl.multiple_of(p_y, [1, 16])
    m_y = m_t[:, None] & m_o[None, :]
    b_g, b_c = _load_vector(g_address, o_o, width, 1.0), _load_vector(c_address, o_o, width, 0.0)
    b_y = tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
    b_y = b_g[None, :] * (b_y + tl.load(scalings_ptr + i_entry) * acc) + b_c[None, :]
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_y)
