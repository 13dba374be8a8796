"""Headers made to cost: each is judged in less than a second of processor time and in bounded memory."""

from __future__ import annotations

import contextlib
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loraplex_registry.peft.errors import AdapterFileError
from loraplex_registry.peft.header import MAX_HEADER_BYTES, MAX_TENSORS, read_header

ENTRY = '"t%06d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


def fill(prefix: bytes, unit: bytes, suffix: bytes, count: int | None = None) -> bytes:
    return prefix + unit * (count or (MAX_HEADER_BYTES - len(prefix) - len(suffix)) // len(unit)) + suffix


def joined(text: str, count: int) -> bytes:
    return ("{" + ",".join(text % number for number in range(count)) + "}").encode()


MAX_COMMAS = 12 * MAX_TENSORS - 1
ATTACKS: dict[str, Callable[[], bytes]] = {
    "arrays": lambda: fill(b'{"a":[', b"[],", b"0]}"),
    "numbers": lambda: fill(b'{"a":[', b"123456,", b"0]}", MAX_COMMAS),
    "fractions": lambda: fill(b'{"a":[', b"1.5e3,", b"0]}", MAX_COMMAS),
    "digits": lambda: fill(b'{"a":', b"9", b"}"),
    "many digits": lambda: fill(b'{"a":[', b"9" * 4300 + b",", b"0]}"),
    "escapes": lambda: fill(b'{"', b"\\u0041", b'":0}'),
    "spaces": lambda: fill(b"{", b" ", b"x"),
    "a long name": lambda: fill(b'{"', b"a", b'":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'),
    "one name often": lambda: joined('"a":0%.0s', 599_999),
    "many names": lambda: joined('"%d":0', 599_999),
    "many facts": lambda: b'{"__metadata__":' + joined('"%d":""', 599_990) + b"}",
    "one large fact": lambda: fill(b'{"__metadata__":{"a":"', b"x", b'"}}'),
    "as many tensors as may be": lambda: joined(ENTRY, MAX_TENSORS),
    "tensors over one another": lambda: joined(ENTRY.replace("[0]", "[1]").replace("[0,0]", "[0,4]"), MAX_TENSORS),
    "many dimensions": lambda: json.dumps({"a": {"dtype": "F32", "shape": [1] * 999_999, "data_offsets": []}}).encode(),
    "large dimensions": lambda: json.dumps(
        {"a": {"dtype": "F32", "shape": [2**61] * 8, "data_offsets": [0, 4]}}
    ).encode(),
    "nested arrays": lambda: fill(b'{"a":', b"[", b"", 400_000),
    "nested objects": lambda: fill(b"", b'{"a":', b"", 400_000),
    "no text": lambda: fill(b'{"', b"\xff", b'"}'),
}


@pytest.fixture
def without_collector() -> Iterator[None]:
    """As in the process of the checks, whose forks end before there is anything to collect."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("name", ATTACKS)
def test_a_header_made_to_cost_is_cheap(tmp_path: Path, frame_header: Callable[..., bytes], name: str) -> None:
    header = ATTACKS[name]()
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(frame_header(header, bytes(4)))
    assert len(header) <= MAX_HEADER_BYTES
    begin_s = time.process_time()
    with pytest.raises(AdapterFileError) as caught:
        read_header(path)
    assert time.process_time() - begin_s < 5
    assert caught.value.check in ("header", "truncated")
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("name", ["numbers", "many facts"])
def test_a_header_made_to_grow_stays_small(tmp_path: Path, frame_header: Callable[..., bytes], name: str) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(frame_header(ATTACKS[name]()))
    tracemalloc.start()
    with contextlib.suppress(AdapterFileError):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 256 << 20
