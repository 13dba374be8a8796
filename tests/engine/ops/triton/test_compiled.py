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
    CHIPS,
    DTYPES,
    EXPAND_TILES,
    MAX_PLANES,
    SHRINK_TILES,
    Variant,
    dispatchable_variants,
    find_chip,
    num_planes,
)

PAGE = Path(__file__).resolve().parents[4] / "docs" / "kernels.md"
VARIANTS = list(itertools.product(dispatchable_variants(), CHIPS))
# one of each op and kind of dtype on each chip, aligned and ragged in turn; all of them take minutes
SAMPLE = [
    (Variant(op, dtype, is_aligned, planes), chip)
    for chip, is_aligned in zip(CHIPS, (True, False, True), strict=True)
    for op, dtype, planes in (
        ("shrink", torch.bfloat16, 1),
        ("expand", torch.bfloat16, MAX_PLANES),
        ("expand", torch.float16, 1),
        ("shrink", torch.float32, 1),
        ("expand", torch.float32, 2),
    )
]


def _name(value: object) -> str:
    if isinstance(value, Variant):
        rows = "aligned" if value.is_aligned else "ragged"
        return f"{value.op}-{str(value.dtype).removeprefix('torch.')}-{rows}-{value.planes}"
    return f"sm_{value}"


@pytest.fixture
def report(monkeypatch, tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from loraplex_engine.ops.lora import triton_report

    return triton_report


@pytest.mark.parametrize(
    ("variant", "chip"), VARIANTS if os.environ.get("LORAPLEX_TEST_LONG") == "1" else SAMPLE, ids=_name
)
def test_variant_keeps_the_rules(report, variant, chip):
    import triton

    compiled = report.compile_variant(variant, chip)
    compiled.check_rules()
    text = PAGE.read_text(encoding="utf-8")
    if f"Triton {triton.__version__}," in text:
        assert compiled.to_row() in text, "run: python -m loraplex_engine.ops.lora.triton_report docs/kernels.md"


@pytest.mark.parametrize(
    "change",
    [{"spills": 1}, {"tensor_core": ""}, {"has_tensor_core_sass": False}, {"has_wide_copies": False}],
    ids=lambda change: next(iter(change)),
)
def test_rules_can_be_broken(report, change):
    good = {"spills": 0, "tensor_core": "mma.sync", "has_tensor_core_sass": True, "has_wide_copies": True}
    variant = Variant("shrink", torch.bfloat16, is_aligned=True, planes=1)
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


def test_planes_depend_on_the_width_alone_and_every_number_has_a_variant():
    widths = [1, 64, 576, 1023, 1024, 1536, 2048, 4096, 14336, 151936]
    assert [num_planes(width) for width in widths] == [1, 1, 1, 1, 2, 2, 4, 8, 8, 8]
    compiled = {variant.planes for variant in dispatchable_variants() if variant.op == "expand"}
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

    kernels = dispatch.select_kernels("cuda", dtype)
    assert kernels.name == "triton"
    assert (kernels.lora_shrink, kernels.lora_expand) == (triton_form.lora_shrink, triton_form.lora_expand)


def test_cuda_is_served_by_the_torch_form_where_triton_is_not(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert dispatch._cuda_kernels().name == "torch"
