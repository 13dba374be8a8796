from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.spec import TensorRef
from loraplex_registry.peft.tensor_scan import CHUNK_BYTES, TensorScan, find_peak, scan_tensor, scan_tensors


def is_finite(data: bytes, dtype: str) -> bool:
    return TensorScan("", dtype, find_peak(data, dtype)).is_finite


HALVES = st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=20)


@given(HALVES)
def test_float16_is_finite_exactly_where_numpy_says_so(bits: list[int]) -> None:
    data = np.array(bits, "<u2").tobytes()
    assert is_finite(data, "F16") == bool(np.isfinite(np.frombuffer(data, "<f2")).all())


@given(HALVES)
def test_bfloat16_is_finite_exactly_where_its_float32_is(bits: list[int]) -> None:
    data = np.array(bits, "<u2").tobytes()
    widened = (np.array(bits, "<u4") << 16).view("<f4")
    assert is_finite(data, "BF16") == bool(np.isfinite(widened).all())


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_float32_is_finite_exactly_where_numpy_says_so(bits: list[int]) -> None:
    data = np.array(bits, "<u4").tobytes()
    assert is_finite(data, "F32") == bool(np.isfinite(np.frombuffer(data, "<f4")).all())


@pytest.mark.parametrize("position", [0, 1, -1])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_bad_value_anywhere_in_a_large_tensor_is_found(tmp_path: Path, position: int, bad: float) -> None:
    values = np.zeros(CHUNK_BYTES // 4 + 3, "<f4")
    assert scan(tmp_path, values).is_finite
    values[position] = bad
    assert not scan(tmp_path, values).is_finite


def scan(tmp_path: Path, *tensors: np.ndarray, threads: int = 1, dtype: str = "F32") -> TensorScan:
    """Scan tensors that lie one after another, and return the last one's scan."""
    data, refs = b"head", []
    for values in tensors:
        refs.append(TensorRef("x", dtype, values.shape, len(data), len(data) + values.nbytes))
        data += values.tobytes()
    (tmp_path / "x").write_bytes(data + b"tail")
    with (tmp_path / "x").open("rb") as file:
        return scan_tensors(file.fileno(), refs, threads)[-1]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9))
def test_the_largest_magnitude_is_numpy_s(values: list[float]) -> None:
    array = np.array(values, "<f4")
    assert TensorScan("", "F32", find_peak(array.tobytes(), "F32")).largest == np.abs(array).max()
    half = np.clip(array, -60000, 60000).astype("<f2")
    assert TensorScan("", "F16", find_peak(half.tobytes(), "F16")).largest == np.abs(half).max()


@pytest.mark.parametrize(
    ("values", "dtype", "says"),
    [
        ([0.0, 0.0], "<f4", ""),
        ([1.0, 1e-30], "<f4", ""),
        ([65504.0], "<f4", ""),
        ([65519.0], "<f4", ""),
        ([-65520.0], "<f4", "infinite in float16"),
        ([1e38], "<f4", "infinite in float16"),
        ([-3.4e38], "<f4", "infinite in bfloat16"),
        ([2.0**-24], "<f4", ""),
        ([2.0**-25, 0], "<f4", "zero in float16"),
        ([-(2.0**-140)], "<f4", "zero in bfloat16"),
        ([60000.0, 1e-7], "<f2", ""),
    ],
)
def test_what_narrower_numbers_cannot_hold_is_said(tmp_path: Path, values: list[float], dtype: str, says: str) -> None:
    name = {"<f4": "F32", "<f2": "F16"}[dtype]
    said = scan(tmp_path, np.array(values, dtype), dtype=name).describe_range()
    assert (says in said) == bool(says or not said)
    assert bool(said) == bool(says)


def test_bfloat16_that_float16_cannot_hold_is_said(tmp_path: Path) -> None:
    large = (np.array([1e9], "<f4").view("<u4") >> 16).astype("<u2")
    assert "9.98e+08" in scan(tmp_path, large, dtype="BF16").describe_range()


@pytest.mark.parametrize("threads", [1, 4])
def test_the_hash_covers_exactly_the_tensor_s_bytes(tmp_path: Path, threads: int) -> None:
    values = [np.arange(seed, seed + 3 * CHUNK_BYTES, dtype="<f4") for seed in range(3)]
    expected = hashlib.sha256(values[-1].tobytes()).hexdigest()
    assert scan(tmp_path, *values, threads=threads).sha256 == expected


def test_a_file_that_shrank_meanwhile_is_truncated(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(8))
    with pytest.raises(AdapterFileError) as caught, (tmp_path / "x").open("rb") as file:
        scan_tensor(file.fileno(), TensorRef("x", "F32", (4,), 0, 16))
    assert caught.value.check == "truncated"


def test_a_large_tensor_is_read_in_bounded_memory(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.truncate(64 * CHUNK_BYTES)
    tracemalloc.start()
    with (tmp_path / "x").open("rb") as file:
        scan_tensor(file.fileno(), TensorRef("x", "BF16", (32 * CHUNK_BYTES,), 0, 64 * CHUNK_BYTES))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * CHUNK_BYTES
