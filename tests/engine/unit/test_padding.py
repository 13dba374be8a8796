from __future__ import annotations

import pytest

from loraplex_engine.core.module_group import GROUP_INDEX
from loraplex_engine.lora.packed import LoadDone, PackedModule
from loraplex_engine.lora.padding import EXACT, FORM_TO_TILE, PaddingMeter, Tile, needed_bytes, padding_ratio, row_work
from loraplex_engine.ops.lora.segment import CHUNK_ROWS

QV = [(8, 1152), (8, 768)]
PATTERN = [(16, 1152), (4, 768)]


def test_mix_counted_by_hand() -> None:
    tile = Tile(16, 16)
    works = [row_work(QV, tile), row_work(PATTERN, tile)]
    # a row needs 8 x 1920 = 15360 and 16 x 1152 + 4 x 768 = 21504; in ranks of 16 both take 16 x 1920 = 30720
    assert [(work.needed, work.computed) for work in works] == [(15360, 30720), (21504, 30720)]
    # 1 row takes 16, 20 rows take 32
    needed = 1 * 15360 + 20 * 21504
    computed = 16 * 30720 + 32 * 30720
    assert padding_ratio([1, 20], works, tile) == pytest.approx(1 - needed / computed)


def test_exact_ranks_and_rows_waste_nothing() -> None:
    assert padding_ratio([1, 7, 133], [row_work(QV, EXACT), row_work(PATTERN, EXACT), row_work(QV, EXACT)], EXACT) == 0


def test_dense_form_computes_every_row_for_every_adapter() -> None:
    tile = FORM_TO_TILE["torch"]
    works = [row_work(QV, tile)] * 4
    assert padding_ratio([1, 1, 1, 1], works, tile) == 0.75


def test_step_without_adapters_has_no_padding() -> None:
    assert padding_ratio([], [], FORM_TO_TILE["triton"]) == 0


def _facts(digest: str) -> LoadDone:
    q = PackedModule(0, 0, 0, 8, 1.0, 576, 576, 0, 9216)
    v = PackedModule(0, 0, 2, 4, 1.0, 576, 192, 18432, 23040, c_start=24576)
    embedding = PackedModule(0, GROUP_INDEX["embedding"], 0, 2, 1.0, 49152, 576, 25344, 221952)
    return LoadDone(digest, 224256 + 64, 8, (q, v, embedding), 0.0, 0.0, 0.0)


def test_meter_knows_the_modules_and_counts_an_embedding_only_in_expand() -> None:
    meter = PaddingMeter("triton", 2, _facts)
    meter.observe_step({"a": 3, "b": 17})
    needed = 8 * (576 + 576) + 4 * (576 + 192) + 2 * 576
    computed = 16 * (576 + 576) + 16 * (576 + 192) + 16 * 576
    assert meter.step_ratio == pytest.approx(1 - 20 * needed / ((16 + 32) * computed))
    meter.observe_step({})
    assert meter.step_ratio > 0


def test_gaps_between_matrices_are_counted_in_bytes() -> None:
    needed = 2 * (8 * 1152 + 4 * 768 + 2 * (49152 + 576)) + 4 * 192
    assert needed_bytes(_facts("a"), 2) == needed
    assert PaddingMeter("native", 2, _facts).bytes_ratio(["a"]) == pytest.approx(1 - needed / 224320)


def test_tile_of_the_triton_form_is_that_of_its_segments() -> None:
    assert FORM_TO_TILE["triton"].rows == CHUNK_ROWS
