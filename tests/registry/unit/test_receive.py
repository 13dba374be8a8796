"""Receiving a body: any chunking gives the same files, limits hold while bytes arrive."""

from __future__ import annotations

import asyncio
import hashlib
import json
import resource
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
    StoreUnavailableError,
    UnsupportedMediaTypeError,
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
    ("names", "reason"),
    [
        (["README.md"] * 2, "README.md is there twice"),
        (["adapter_config.json"] * 2, "adapter_config.json is there twice"),
        ([f"tokenizer-{number}.json" for number in range(10_000)], "more than 16 files"),
    ],
)
async def test_names_twice_and_too_many_are_refused_for_that_reason(
    tmp_path: Path, names: list[str], reason: str
) -> None:
    body = b"".join(encode({name: b"{}"}).removesuffix(f"--{BOUNDARY}--\r\n".encode()) for name in names)
    with pytest.raises(AdapterRejectedError, match=reason) as refused:
        await receive(chunks(body, [997]), BOUNDARY, tmp_path, 10 << 20)
    assert [check.name for check in refused.value.report.checks if check.verdict == "fail"] == ["file_set"]


def part(*lines: str) -> bytes:
    return "\r\n".join([f"--{BOUNDARY}", *lines, "", "{}", f"--{BOUNDARY}--", ""]).encode()


DISPOSITION = 'Content-Disposition: form-data; name="files"; filename="README.md"'


@pytest.mark.parametrize(
    "lines",
    [
        [DISPOSITION, "Content-Encoding: gzip"],
        [DISPOSITION, "content-transfer-encoding: Base64"],
        [DISPOSITION, "Content-Transfer-Encoding: quoted-printable"],
    ],
)
async def test_an_encoded_part_is_415(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(UnsupportedMediaTypeError):
        await receive(chunks(part(*lines), [50]), BOUNDARY, tmp_path, 1 << 20)


@pytest.mark.parametrize(
    "lines",
    [
        [DISPOSITION, DISPOSITION.replace("README.md", "vocab.json")],
        [DISPOSITION + '; filename="vocab.json"'],
        [DISPOSITION + "; FILENAME=vocab.json"],
        [DISPOSITION + "; filename*=utf-8''vocab.json"],
        [DISPOSITION + '; name="files"'],
        [DISPOSITION + "; filename"],
    ],
)
async def test_a_part_with_two_names_is_refused(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await receive(chunks(part(*lines), [50]), BOUNDARY, tmp_path, 1 << 20)
    assert refused.value.param == "Content-Disposition"


@pytest.mark.parametrize("encoding", ["binary", "8BIT", "7bit"])
async def test_a_part_that_says_that_it_is_plain_is_taken(tmp_path: Path, encoding: str) -> None:
    lines = [DISPOSITION.replace('"README.md"', "README.md"), f"Content-Transfer-Encoding: {encoding}"]
    with pytest.raises(AdapterRejectedError, match="missing"):
        await receive(chunks(part(*lines), [50]), BOUNDARY, tmp_path, 1 << 20)


async def test_a_name_with_a_backslash_is_told_alone(tmp_path: Path) -> None:
    with pytest.raises(AdapterRejectedError) as refused:
        await receive(chunks(part(DISPOSITION.replace("README", r"C:\\x\y")), [50]), BOUNDARY, tmp_path, 1 << 20)
    assert json.loads(refused.value.message.split("file name ")[1].split(" is not")[0]) == r"C:\\x\y.md"


async def test_a_full_disk_is_unavailability_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = FILES | {"adapter_model.safetensors": b"x" * (3 << 20)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_500_000, hard))
    try:
        with pytest.raises(StoreUnavailableError):
            await receive(chunks(encode(large), [65536]), BOUNDARY, tmp_path, 10 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ["cannot be written" in line for line in caplog.messages] == [True]
    assert "Traceback" not in caplog.text


async def test_silence_ends_in_408(tmp_path: Path) -> None:
    async def stalled() -> AsyncIterator[bytes]:
        yield encode(FILES)[:300]
        await asyncio.sleep(60)

    with pytest.raises(BodyTimeoutError):
        await receive(stalled(), BOUNDARY, tmp_path, 1 << 20, idle_timeout_s=0.05)


async def test_body_cut_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError):
        await receive(chunks(encode(FILES)[:-30], [512]), BOUNDARY, tmp_path, 1 << 20)


async def test_what_cannot_be_read_is_told_without_its_bytes(tmp_path: Path) -> None:
    body = encode({"name": b"x"}).replace(b'filename="name"', b'filename="\xff"')
    with pytest.raises(InvalidRequestError) as caught:
        await receive(chunks(body, [len(body)]), BOUNDARY, tmp_path, 1 << 20)
    assert caught.value.message == "The body is not whole multipart/form-data: Segment header failed to decode"


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
