from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.header import MAX_HEADER_BYTES, MAX_TENSORS, read_header

Frame = Callable[..., bytes]
Encode = Callable[..., bytes]


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(data)
    return path


def entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def fault_of(path: Path) -> tuple[str, str]:
    with pytest.raises(AdapterFileError) as caught:
        read_header(path)
    return caught.value.check, caught.value.message


def test_byte_ranges_are_those_of_the_file(tmp_path: Path) -> None:
    arrays = {"b": np.arange(6, dtype="<f4").reshape(2, 3), "a": np.arange(4, dtype="<f2")}
    path = write(tmp_path, save(arrays, metadata={"format": "pt"}))
    table = read_header(path)
    data = path.read_bytes()
    for ref in table.tensors:
        assert data[ref.start : ref.stop] == arrays[ref.name].tobytes()
        assert ref.shape == arrays[ref.name].shape
    assert table.metadata == {"format": "pt"}
    assert (table.tensors[-1].stop, table.size) == (len(data), len(data))


def test_order_of_header_keys_is_free_and_tensors_come_in_byte_order(tmp_path: Path, frame_header: Frame) -> None:
    header = {"z": entry([2], 8, 16), "y": entry([2], 0, 8)}
    table = read_header(write(tmp_path, frame_header(json.dumps(header).encode(), bytes(16))))
    assert [ref.name for ref in table.tensors] == ["y", "z"]


def test_padding_after_the_header_s_object_and_empty_tensors_are_fine(tmp_path: Path, frame_header: Frame) -> None:
    header = {"a": entry([0, 4], 0, 0), "b": entry([1], 0, 4)}
    table = read_header(write(tmp_path, frame_header(json.dumps(header).encode() + b"   ", bytes(4))))
    assert [(ref.name, ref.stop - ref.start) for ref in table.tensors] == [("a", 0), ("b", 4)]


@pytest.mark.parametrize(
    ("header", "size", "check", "says"),
    [
        ({"a": entry([2], 0, 8)}, 3, "truncated", "upload the whole file"),
        ({"a": entry([2], 0, 8)}, 13, "header", "5 bytes follow"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "header", "overlaps"),
        ({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, 8, "header", "overlaps"),
        ({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20, "header", "unused"),
        ({"a": entry([2], 4, 12)}, 12, "header", "unused"),
        ({"a": entry([3], 0, 8)}, 8, "header", "takes"),
        ({"a": entry([2**61, 8], 0, 8)}, 8, "header", "takes"),
        ({"a": entry([2], 8, 0)}, 8, "header", "data_offsets"),
        ({"a": entry([-2], 0, 8)}, 8, "header", "shape"),
        ({"a": entry([True, 2], 0, 8)}, 8, "header", "shape"),
        ({"a": entry([2.0], 0, 8)}, 8, "header", "shape"),
        ({"a": entry([1] * 9, 0, 4)}, 4, "header", "shape"),
        ({"a": entry([2], 0, 8, "F128")}, 8, "header", "unknown dtype"),
        ({"a": entry([2], 0, 8, ["F32"])}, 8, "header", "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "header", "needs exactly"),
        ({"a": {**entry([2], 0, 8), "extra": 1}}, 8, "header", "needs exactly"),
        ({"a": 5}, 0, "header", "needs exactly"),
        ({"": entry([2], 0, 8)}, 8, "header", "name"),
        ({"n" * 513: entry([2], 0, 8)}, 8, "header", "name"),
        ({"a\0": entry([2], 0, 8)}, 8, "header", "NUL"),
        ({"__metadata__": {"a": 1}}, 0, "header", "__metadata__"),
        ({"__metadata__": []}, 0, "header", "__metadata__"),
        ({"__metadata__": {"a": "\ud800"}}, 0, "header", "surrogate"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(
    tmp_path: Path, frame_header: Frame, header: dict[str, object], size: int, check: str, says: str
) -> None:
    found, message = fault_of(write(tmp_path, frame_header(json.dumps(header).encode(), bytes(size))))
    assert (found, says in message) == (check, True), message


@pytest.mark.parametrize(
    ("data", "check"),
    [
        (b"", "truncated"),
        (b"\0\0\0", "truncated"),
        (struct.pack("<Q", 100) + b"{}", "truncated"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "header"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "header"),
        (struct.pack("<Q", 2) + b"[]", "header"),
        (struct.pack("<Q", 0), "header"),
        (struct.pack("<Q", 4) + b'{"a"', "header"),
        (struct.pack("<Q", 3) + b" {}", "header"),
        (struct.pack("<Q", 17) + b'{"a":{},"a":{}}  ', "header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "lfs_pointer"),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"\x80\x04\x95" + bytes(30), "pickle"),
        (b"PK\x03\x04" + bytes(60), "pickle"),
        (bytes(257) + b"ustar\x0000" + bytes(300), "format"),
        (b"GGUF" + bytes(60), "format"),
        (b"\x1f\x8b\x08" + bytes(60), "format"),
        (b"<!DOCTYPE html><html>not found</html>", "format"),
        (b'{"error": "not found", "code": 404}', "format"),
    ],
)
def test_files_that_are_something_else_are_named(tmp_path: Path, data: bytes, check: str) -> None:
    assert fault_of(write(tmp_path, data))[0] == check


def test_a_header_whose_length_starts_like_a_pickle_is_still_safetensors(tmp_path: Path, frame_header: Frame) -> None:
    header = json.dumps({"a": entry([1], 0, 4)}).encode()
    path = write(tmp_path, frame_header(header.ljust(0x0280), bytes(4)))
    assert path.read_bytes().startswith(b"\x80\x02")
    assert [ref.name for ref in read_header(path).tensors] == ["a"]


def test_too_many_tensors_are_refused(tmp_path: Path, frame_header: Frame) -> None:
    body = ",".join(f'"{number}":{{}}' for number in range(MAX_TENSORS + 2))
    assert "more than" in fault_of(write(tmp_path, frame_header(f"{{{body}}}".encode())))[1]


@pytest.mark.parametrize("filler", [b"[],", b"{},", b'"ab",', b"1,", b'"",'])
def test_a_hostile_header_of_full_size_takes_bounded_memory(tmp_path: Path, frame_header: Frame, filler: bytes) -> None:
    body = b'{"a":[' + filler * ((MAX_HEADER_BYTES - 20) // len(filler)) + b"0]}"
    path = write(tmp_path, frame_header(body))
    tracemalloc.start()
    check, _ = fault_of(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert check == "header"
    assert peak < 3 * MAX_HEADER_BYTES


HEADERS = st.dictionaries(
    st.text("ab_", max_size=3) | st.just("__metadata__"),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F16", "BF16", "X"]) | st.none(),
            "shape": st.lists(st.integers(-1, 5) | st.none(), max_size=3) | st.integers(),
            "data_offsets": st.lists(st.integers(-1, 40), max_size=3),
        }
    )
    | st.dictionaries(st.text("ab"), st.text("ab"), max_size=2)
    | st.integers(),
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(HEADERS, st.integers(0, 64))
@example({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 8)
def test_any_header_reads_or_raises_the_module_s_own_error(
    tmp_path: Path, frame_header: Frame, header: dict[str, object], size: int
) -> None:
    path = write(tmp_path, frame_header(json.dumps(header).encode(), bytes(size)))
    try:
        table = read_header(path)
    except AdapterFileError:
        return
    assert sum(ref.stop - ref.start for ref in table.tensors) == size


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=600) | st.binary(max_size=80).map(lambda body: struct.pack("<Q", len(body)) + body))
def test_any_bytes_read_or_raise_the_module_s_own_error(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path, data)
    with contextlib.suppress(AdapterFileError):
        assert read_header(path).size == len(data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_flipped_byte_never_escapes_the_reader(
    tmp_path: Path, encode: Encode, tensors: dict[str, np.ndarray], position: int, value: int
) -> None:
    data = bytearray(encode(tensors))
    data[position % 400] = value
    path = write(tmp_path, bytes(data))
    try:
        table = read_header(path)
    except AdapterFileError:
        return
    assert table.tensors[-1].stop == len(data)


def test_deep_nesting_in_a_header_is_refused(tmp_path: Path, frame_header: Frame) -> None:
    for depth in (500, 900, 100_000):
        body = b'{"a":{"dtype":' + b"[" * depth + b"]" * depth + b',"shape":[1],"data_offsets":[0,4]}}'
        assert fault_of(write(tmp_path, frame_header(body, bytes(4))))[0] == "header"
