"""The table that kernels read: addresses, ranks and scalings, and nothing left behind by a cleared slot."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from loraplex_engine.core.module_group import GROUP_INDEX


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
