"""What the compilers make of the kernels, for chips that need not be there; and who is served by them."""

from __future__ import annotations

import importlib.util
import itertools
import os
from pathlib import Path

import pytest
import torch

from loraplex_engine.ops import dispatch
from loraplex_engine.ops.lora.triton_tiles import (
    EXPAND_TILES,
    MAX_PLANES,
    SHRINK_TILES,
    LoraVariant,
    lora_variants,
    num_planes,
)
from loraplex_engine.ops.triton.attention_tiles import (
    ATTENTION_TILES,
    PADDED_DIMS,
    AttentionVariant,
    attention_variants,
    find_padded_dim,
)
from loraplex_engine.ops.triton.chip import CHIPS, DTYPES, find_chip

PAGE = Path(__file__).resolve().parents[4] / "docs" / "kernels.md"
TENSOR_CORE = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
VARIANTS = list(itertools.product((*lora_variants(), *attention_variants()), CHIPS))
# one of each op and kind of dtype, chips in turn, aligned and ragged in turn: `make endure`; all of them take minutes
SAMPLE = [
    (LoraVariant(op, dtype, place % 2 == 0, planes), CHIPS[place % 3])
    for place, (op, dtype, planes) in enumerate(
        (
            ("shrink", torch.bfloat16, 1),
            ("expand", torch.bfloat16, MAX_PLANES),
            ("expand", torch.float16, 1),
            ("shrink", torch.float32, 1),
            ("expand", torch.float32, 2),
        )
    )
]
SAMPLE += [
    (AttentionVariant(dtype, PADDED_DIMS[place]), chip)
    for place, (dtype, chip) in enumerate(zip(DTYPES, CHIPS, strict=True))
]
# of each op and of each chip one
FEW = [SAMPLE[place] for place in (2, 3, 6)]


def _name(value: object) -> str:
    if isinstance(value, int):
        return f"sm_{value}"
    rows = "aligned" if value.is_aligned else "ragged"
    detail = value.detail.replace(" ", "_")
    return f"{value.op}-{str(value.dtype).removeprefix('torch.')}-{rows}-{detail}".rstrip("-")


@pytest.fixture
def report(monkeypatch, tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from loraplex_engine.ops.triton import report

    return report


def pytest_generate_tests(metafunc):
    if "variant" in metafunc.fixturenames:
        sample = SAMPLE if metafunc.config.getoption("--endure") else FEW
        chosen = VARIANTS if os.environ.get("LORAPLEX_TEST_LONG") == "1" else sample
        metafunc.parametrize(("variant", "chip"), chosen, ids=_name)


@pytest.mark.endure
def test_variant_keeps_the_rules(report, variant, chip):
    import triton

    compiled = report.compile_variant(variant, chip)
    compiled.check_rules()
    if variant.op == "attention" and compiled.tensor_core:
        assert compiled.tensor_core == TENSOR_CORE[chip]
    text = PAGE.read_text(encoding="utf-8")
    if f"Triton {triton.__version__}," in text:
        assert compiled.to_row() in text, "run: python -m loraplex_engine.ops.triton.report docs/kernels.md"


@pytest.mark.parametrize(
    "change",
    [{"spills": 1}, {"tensor_core": ""}, {"has_tensor_core_sass": False}, {"has_wide_copies": False}],
    ids=lambda change: next(iter(change)),
)
def test_rules_can_be_broken(report, change):
    good = {"spills": 0, "tensor_core": "mma.sync", "has_tensor_core_sass": True, "has_wide_copies": True}
    variant = LoraVariant("shrink", torch.bfloat16, is_aligned=True, planes=1)
    report.Compiled(variant, 90, registers=1, shared_bytes=0, **good).check_rules()
    with pytest.raises(AssertionError):
        report.Compiled(variant, 90, registers=1, shared_bytes=0, **{**good, **change}).check_rules()


def test_page_has_a_row_for_each_variant():
    text = PAGE.read_text(encoding="utf-8")
    assert sum(line.startswith("| sm_") for line in text.splitlines()) == len(VARIANTS)


def test_every_chip_has_tiles_with_a_reason():
    for tiles in (SHRINK_TILES, EXPAND_TILES):
        assert set(tiles) == set(itertools.product(CHIPS, (True, False)))
        assert all(tile.reason for tile in tiles.values())
    assert set(ATTENTION_TILES) == set(itertools.product(CHIPS, (True, False), PADDED_DIMS))
    assert all(tile.reason for tile in ATTENTION_TILES.values())


@pytest.mark.parametrize(
    ("head_dim", "padded"),
    [(8, 64), (64, 64), (72, 128), (80, 128), (96, 128), (128, 128), (256, 256), (257, None), (264, None), (100, None)],
)
def test_head_dims_take_the_next_tile_if_their_rows_are_aligned(head_dim, padded):
    assert find_padded_dim(head_dim) == padded


def test_planes_depend_on_the_width_alone_and_every_number_has_a_variant():
    widths = [1, 64, 576, 1023, 1024, 1536, 2048, 4096, 14336, 151936]
    assert [num_planes(width) for width in widths] == [1, 1, 1, 1, 2, 2, 4, 8, 8, 8]
    compiled = {variant.planes for variant in lora_variants() if variant.op == "expand"}
    assert {num_planes(width) for width in range(1, 20000)} == compiled


@pytest.mark.parametrize(
    ("capability", "chip"), [((8, 0), 80), ((8, 9), 80), ((9, 0), 90), ((10, 3), 100), ((12, 0), 100), ((7, 5), 80)]
)
def test_a_chip_without_rows_takes_those_of_the_newest_that_is_not_newer(monkeypatch, capability, chip):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert find_chip(torch.device("cuda")) == chip


@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_is_served_by_triton_where_it_is_installed(dtype):
    pytest.importorskip("triton", reason="triton is not installed")
    from loraplex_engine.ops.lora import triton_form
    from loraplex_engine.ops.triton import attention

    kernels = dispatch.select_kernels("cuda", dtype)
    assert kernels.name == "triton"
    assert (kernels.lora_shrink, kernels.lora_expand) == (triton_form.lora_shrink, triton_form.lora_expand)
    assert kernels.paged_attention is attention.paged_attention


def test_cuda_is_served_by_the_torch_form_where_triton_is_not(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert dispatch._cuda_kernels().name == "torch"
