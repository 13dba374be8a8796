"""The table that kernels read: addresses, ranks and scalings, and nothing left behind by a cleared slot."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from loraplex_engine.core.module_group import GROUP_INDEX
from loraplex_engine.ops.lora.row import MODULE_ROW


def test_a_module_is_found_by_address_rank_and_scaling(lora_table):
    table = lora_table(3, torch.float32, num_layers=2)
    a, b = torch.randn(4, 37), torch.randn(4, 18)
    table.set_module(2, 1, "qkv", 1, a, b, 0.5)
    place = (2, 1, GROUP_INDEX["qkv"], 1)
    assert table.entries[place].tolist() == [a.data_ptr(), b.data_ptr(), 4, 0, 0]
    assert table.scalings[place] == 0.5
    assert table.occupied.tolist() == [0, 0, 1]
    assert table.entries[..., 2].sum() == 4
    assert table.find_module(2, 1, "qkv", 1).rank == 4
    assert table.find_module(2, 0, "qkv", 1) is None


def test_a_cleared_slot_is_empty_and_lets_go_of_its_tensors(lora_table):
    table = lora_table(2, torch.float32)
    a = torch.randn(4, 37)
    table.set_module(1, 0, "qkv", 0, a, torch.randn(4, 50), 0.5)
    held = weakref.ref(a)
    del a
    table.clear(1)
    gc.collect()
    assert held() is None
    assert table.entries.count_nonzero() == 0
    assert table.scalings.isnan().all()
    assert table.occupied.tolist() == [0, 0]
    with pytest.raises(IndexError, match="slot 1 is empty"):
        table.find_module(1, 0, "qkv", 0)


def test_slices_know_their_columns(lora_table):
    table = lora_table(1, torch.float32)
    assert table.features[GROUP_INDEX["qkv"]].tolist() == [[0, 50, 37], [50, 18, 37], [68, 18, 37]]
    assert table.features[GROUP_INDEX["down"]].tolist() == [[0, 600, 67], [0, 0, 0], [0, 0, 0]]
    assert table.width("gate_up") == 2 * 64


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(65, 37), torch.zeros(65, 50)),
        (torch.zeros(4, 36), torch.zeros(4, 50)),
        (torch.zeros(4, 37), torch.zeros(5, 50)),
        (torch.zeros(4, 37).bfloat16(), torch.zeros(4, 50)),
        (torch.zeros(37, 4).T, torch.zeros(4, 50)),
    ],
    ids=["rank", "features", "pair", "dtype", "layout"],
)
def test_what_the_kernels_could_not_read_is_not_taken(lora_table, a, b):
    table = lora_table(1, torch.float32)
    with pytest.raises(AssertionError):
        table.set_module(0, 0, "qkv", 0, a, b, 1.0)
    assert table.occupied.tolist() == [0]


def _pack(dtype):
    """A module with everything, one with c alone and an embedding, in one buffer; and their tensors."""
    parts = [torch.randn(4, 37).to(dtype), torch.randn(4, 18).to(dtype), torch.randn(18), torch.randn(18)]
    parts += [torch.randn(600), torch.randn(90, 3).to(dtype), torch.randn(3, 37).to(dtype)]
    starts = np.cumsum([0] + [64 * -(-part.nbytes // 64) for part in parts])
    buffer = torch.zeros(int(starts[-1]), dtype=torch.uint8)
    for part, start in zip(parts, starts, strict=False):
        buffer[start : start + part.nbytes] = part.view(-1).view(torch.uint8)
    a, b, g, c, alone, embed_a, embed_b, _ = starts.tolist()
    rows = [
        ((1, GROUP_INDEX["qkv"], 1), (a, b, 4, g, c), 0.5),
        ((0, GROUP_INDEX["down"], 0), (-1, -1, 0, -1, alone), 0.0),
        ((0, GROUP_INDEX["embedding"], 0), (embed_a, embed_b, 3, -1, -1), 2.0),
    ]
    return buffer, np.array(rows, dtype=MODULE_ROW), parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_set_as_a_whole_is_as_its_modules_set_one_by_one(lora_table, dtype):
    whole, single = lora_table(3, dtype, num_layers=2), lora_table(3, dtype, num_layers=2)
    buffer, rows, (a, b, g, c, alone, embed_a, embed_b) = _pack(dtype)
    whole.set_adapter(2, buffer, rows)
    single.set_module(2, 1, "qkv", 1, a, b, 0.5, g, c)
    single.set_module(2, 0, "down", 0, None, None, 0.0, None, alone)
    single.set_module(2, 0, "embedding", 0, embed_a, embed_b, 2.0)
    assert whole.occupied.tolist() == single.occupied.tolist() == [0, 0, 1]
    assert torch.equal(whole.scalings.nan_to_num(-1), single.scalings.nan_to_num(-1))
    assert torch.equal(whole.entries != 0, single.entries != 0)
    assert torch.equal(whole.entries[..., 2], single.entries[..., 2])
    for place in ((1, "qkv", 1), (0, "down", 0), (0, "embedding", 0), (0, "qkv", 1)):
        ours, theirs = whole.find_module(2, *place), single.find_module(2, *place)
        assert (ours is None) == (theirs is None)
        for name in ("a", "b", "g", "c") if ours is not None else ():
            found, expected = getattr(ours, name), getattr(theirs, name)
            assert (found is None) == (expected is None)
            if found is not None:
                assert torch.equal(found, expected)
                column = {"a": 0, "b": 1, "g": 3, "c": 4}[name]
                assert whole.entries[2, place[0], GROUP_INDEX[place[1]], place[2], column] == found.data_ptr()


def test_a_cleared_slot_lets_go_of_a_whole_adapter(lora_table):
    table = lora_table(3, torch.float32, num_layers=2)
    buffer, rows, _ = _pack(torch.float32)
    held = weakref.ref(buffer)
    table.set_adapter(2, buffer, rows)
    table.find_module(2, 1, "qkv", 1)
    del buffer
    gc.collect()
    assert held() is not None
    table.clear(2)
    gc.collect()
    assert held() is None
    assert table.entries.count_nonzero() == 0
    assert table.occupied.tolist() == [0, 0, 0]
    with pytest.raises(IndexError, match="slot 2 is empty"):
        table.find_module(2, 1, "qkv", 1)


@pytest.mark.parametrize("fault", ["short", "rank", "pair", "slice", "aligned", "negative rank"])
def test_rows_that_would_let_the_kernels_read_elsewhere_are_not_taken(lora_table, fault):
    table = lora_table(3, torch.float32, num_layers=2)
    buffer, rows, _ = _pack(torch.float32)
    if fault == "short":
        buffer = buffer[:-64]
    elif fault == "slice":
        rows["place"][1] = 0, GROUP_INDEX["down"], 1
    elif fault == "pair":
        rows["entry"][0, 1] = -1
    elif fault == "aligned":
        rows["entry"][0, 3] += 2
    else:
        rows["entry"][0, 2] = 65 if fault == "rank" else -4
    with pytest.raises(AssertionError):
        table.set_adapter(2, buffer, rows)
    assert table.occupied.tolist() == [0, 0, 0]
    assert table.entries.count_nonzero() == 0
