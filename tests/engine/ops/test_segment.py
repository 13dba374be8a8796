"""Segments: rows grouped by slot, sorted and stable."""

from __future__ import annotations

import torch

from loraplex_engine.core.request import NO_SLOT
from loraplex_engine.ops.lora.segment import build_segments


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
