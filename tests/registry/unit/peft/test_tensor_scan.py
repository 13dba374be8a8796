from __future__ import annotations

import hashlib
import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.spec import TensorRef
from loraplex_registry.peft.tensor_scan import CHUNK_BYTES, is_all_finite, scan_tensor

HALVES = st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=20)


@given(HALVES)
def test_float16_is_finite_exactly_where_numpy_says_so(bits: list[int]) -> None:
    data = np.array(bits, "<u2").tobytes()
    assert is_all_finite(data, "F16") == bool(np.isfinite(np.frombuffer(data, "<f2")).all())


@given(HALVES)
def test_bfloat16_is_finite_exactly_where_its_float32_is(bits: list[int]) -> None:
    data = np.array(bits, "<u2").tobytes()
    widened = (np.array(bits, "<u4") << 16).view("<f4")
    assert is_all_finite(data, "BF16") == bool(np.isfinite(widened).all())


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_float32_is_finite_exactly_where_numpy_says_so(bits: list[int]) -> None:
    data = np.array(bits, "<u4").tobytes()
    assert is_all_finite(data, "F32") == bool(np.isfinite(np.frombuffer(data, "<f4")).all())


@pytest.mark.parametrize("position", [0, 1, -1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_value_anywhere_in_a_large_tensor_is_found(position: int, bad: float) -> None:
    values = np.zeros(CHUNK_BYTES // 4 + 3, "<f4")
    assert scan(values)[1]
    values[position] = bad
    assert not scan(values)[1]


def scan(values: np.ndarray) -> tuple[str, bool]:
    data = b"head" + values.tobytes() + b"tail"
    return scan_tensor(io.BytesIO(data), TensorRef("x", "F32", values.shape, 4, len(data) - 4))


def test_the_hash_covers_exactly_the_tensor_s_bytes() -> None:
    values = np.arange(CHUNK_BYTES // 2, dtype="<f4")
    assert scan(values)[0] == hashlib.sha256(values.tobytes()).hexdigest()


def test_a_file_that_shrank_meanwhile_is_truncated() -> None:
    with pytest.raises(AdapterFileError) as caught:
        scan_tensor(io.BytesIO(bytes(8)), TensorRef("x", "F32", (4,), 0, 16))
    assert caught.value.check == "truncated"


def test_a_large_tensor_is_read_in_bounded_memory(tmp_path: Path, encode: Callable[..., bytes]) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate(64 * CHUNK_BYTES)
    tracemalloc.start()
    with path.open("rb") as file:
        scan_tensor(file, TensorRef("x", "BF16", (32 * CHUNK_BYTES,), 0, 64 * CHUNK_BYTES))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * CHUNK_BYTES
