"""Receiving a body: any chunking gives the same files, limits hold while bytes arrive."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex_registry.errors import (
    AdapterRejectedError,
    BodyTimeoutError,
    InvalidRequestError,
    PayloadTooLargeError,
)
from loraplex_registry.uploads.receive import receive

BOUNDARY = "--loraplex-test"
FILES = {
    "adapter_config.json": b'{"r": 8}',
    "adapter_model.safetensors": bytes(range(256)) * 40 + b"\r\n--" + BOUNDARY.encode()[:-1],
    "README.md": b"",
}


def encode(files: dict[str, bytes]) -> bytes:
    parts = b"".join(
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
        + content
        + b"\r\n"
        for name, content in files.items()
    )
    return parts + f"--{BOUNDARY}--\r\n".encode()


async def chunks(body: bytes, sizes: list[int]) -> AsyncIterator[bytes]:
    start, turn = 0, 0
    while start < len(body):
        size = sizes[turn % len(sizes)]
        yield body[start : start + size]
        start, turn = start + size, turn + 1


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chunking_gives_the_same_files(tmp_path: Path, sizes: list[int]) -> None:
    folder = tmp_path / hashlib.sha256(str(sizes).encode()).hexdigest()
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    received = asyncio.run(receive(chunks(encode(FILES), sizes), BOUNDARY, folder, 1 << 20))
    assert {name: file.path.read_bytes() for name, file in received.items()} == FILES
    assert all(file.sha256 == hashlib.sha256(FILES[name]).hexdigest() for name, file in received.items())


async def test_length_is_limited_while_it_arrives(tmp_path: Path) -> None:
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        yield encode({"README.md": b"@"}).partition(b"@")[0]
        while True:
            num_sent += 1
            yield b"x" * 1000

    with pytest.raises(PayloadTooLargeError):
        await receive(endless(), BOUNDARY, tmp_path, 10_000)
    assert num_sent < 12


async def test_bad_name_stops_the_body_at_once(tmp_path: Path) -> None:
    num_read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_read
        for chunk in (encode({"evil.bin": b"x" * 10})[:120], *[b"x" * 1000] * 50):
            num_read += 1
            yield chunk

    with pytest.raises(AdapterRejectedError) as refused:
        await receive(body(), BOUNDARY, tmp_path, 1 << 20)
    assert refused.value.report.first_failure.name == "pickle"
    assert num_read == 1
    assert [*await asyncio.to_thread(tmp_path.iterdir)] == []


@pytest.mark.parametrize(
    "names",
    [["README.md"] * 2, [f"tokenizer-{number}.json" for number in range(17)]],
)
async def test_names_twice_and_too_many_are_refused(tmp_path: Path, names: list[str]) -> None:
    body = b"".join(encode({name: b"{}"}).removesuffix(f"--{BOUNDARY}--\r\n".encode()) for name in names)
    with pytest.raises(AdapterRejectedError) as refused:
        await receive(chunks(body, [997]), BOUNDARY, tmp_path, 1 << 20)
    assert "file_set" in [check.name for check in refused.value.report.checks if check.verdict == "fail"]


async def test_silence_ends_in_408(tmp_path: Path) -> None:
    async def stalled() -> AsyncIterator[bytes]:
        yield encode(FILES)[:300]
        await asyncio.sleep(60)

    with pytest.raises(BodyTimeoutError):
        await receive(stalled(), BOUNDARY, tmp_path, 1 << 20, idle_timeout_s=0.05)


async def test_body_cut_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError):
        await receive(chunks(encode(FILES)[:-30], [512]), BOUNDARY, tmp_path, 1 << 20)


async def test_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    head, _, tail = encode({**FILES, "adapter_model.safetensors": b"@"}).partition(b"@")

    async def body() -> AsyncIterator[bytes]:
        yield head
        piece = b"x" * 65536
        for _ in range(1024):
            yield piece
        yield tail

    tracemalloc.start()
    received = await receive(body(), BOUNDARY, tmp_path, 1 << 30)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert received["adapter_model.safetensors"].size == 64 << 20
    assert peak < 8 << 20
