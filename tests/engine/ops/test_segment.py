"""Segments: rows grouped by slot, sorted and stable."""

from __future__ import annotations

import random

import pytest
import torch

from loraplex_engine.core.request import NO_SLOT
from loraplex_engine.ops.lora.segment import CHUNK_ROWS, SegmentBuffers, build_segments, max_chunks


def test_rows_are_grouped_by_slot_in_ascending_order():
    segments = build_segments([3, NO_SLOT, 0, 3, 0, NO_SLOT, 7])
    assert segments.token_indices.tolist() == [2, 4, 0, 3, 6]
    assert segments.starts.tolist() == [0, 2, 4, 5]
    assert segments.slots.tolist() == [0, 3, 7]
    assert segments.num_rows == 5
    assert {t.dtype for t in (segments.token_indices, segments.starts, segments.slots)} == {torch.int32}


def test_a_step_of_base_rows_has_no_segments():
    assert build_segments([NO_SLOT] * 4) is None
    assert build_segments([]) is None


def test_spans_name_each_slot_with_its_rows():
    spans = build_segments([1, 0, 1]).spans()
    assert [(slot, rows.tolist()) for slot, rows in spans] == [(0, [1]), (1, [0, 2])]


def test_a_long_segment_is_cut_into_chunks():
    segments = build_segments([5] * (2 * CHUNK_ROWS + 3) + [NO_SLOT, 2])
    assert segments.chunks.tolist() == [
        [2, 0, 1],
        [5, 1, CHUNK_ROWS],
        [5, 1 + CHUNK_ROWS, CHUNK_ROWS],
        [5, 1 + 2 * CHUNK_ROWS, 3],
    ]


@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize("num_slots", [1, 3, 40])
def test_max_chunks_is_reached_and_never_passed(num_rows, num_slots):
    num_segments = min(num_rows, num_slots)
    worst = [0] * (num_rows - num_segments + 1) + list(range(1, num_segments))
    assert len(build_segments(worst).chunks) == max_chunks(num_rows, num_slots)
    for _ in range(50):
        slots = random.choices(range(num_slots), k=num_rows)
        assert len(build_segments(slots).chunks) <= max_chunks(num_rows, num_slots)


def test_buffers_hold_what_build_segments_builds_at_addresses_that_stay():
    buffers, addresses = SegmentBuffers(40, 8, "cpu"), set()
    for _ in range(20):
        slots = random.choices([NO_SLOT, 0, 3, 7], k=random.randint(1, 40))
        filled, built = buffers.fill(slots), build_segments(slots)
        if built is None:
            assert filled is None
            continue
        for name in ("token_indices", "starts", "slots", "chunks"):
            assert getattr(filled, name).tolist() == getattr(built, name).tolist()
        addresses.add(
            tuple(getattr(filled, name).data_ptr() for name in ("token_indices", "starts", "slots", "chunks"))
        )
    assert len(addresses) == 1


def test_shapes_in_a_bucket_do_not_depend_on_the_step():
    buffers = SegmentBuffers(64, 4, "cpu")
    shapes = set()
    for slots in ([0] * 33, [3], [0, 1, 2, 3] * 8, list(range(4)) + [0] * 28 + [NO_SLOT]):
        segments, built = buffers.fill(slots, bucket=33), build_segments(slots)
        shapes.add((segments.token_indices.shape, segments.chunks.shape))
        assert segments.chunks[: len(built.chunks)].tolist() == built.chunks.tolist()
        assert not segments.chunks[len(built.chunks) :].any()
        assert [slot for slot, _ in segments.spans()] == built.slots.tolist()
    assert len(shapes) == 1


def test_rows_of_impossible_slots_are_refused():
    with pytest.raises(AssertionError, match="-2 is no slot"):
        build_segments([0, -2])
