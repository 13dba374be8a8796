"""Takes a multipart body into a staging folder, chunk by chunk.

Names are judged before bytes are written, sizes while they are. Never holds more than a few chunks in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator
from io import FileIO
from pathlib import Path
from types import TracebackType

from multipart import MultipartError, MultipartSegment, PushMultipartParser  # type: ignore[import-untyped]

from loraplex_registry.errors import (
    AdapterRejectedError,
    BodyTimeoutError,
    InvalidRequestError,
    PayloadTooLargeError,
)
from loraplex_registry.peft.check import check_names
from loraplex_registry.peft.file_rule import max_file_bytes
from loraplex_registry.peft.report import Check, build_report
from loraplex_registry.storage.failure import unavailable_on_failure
from loraplex_registry.uploads.order import StagedFile
from loraplex_registry.uploads.part import read_filename

_IDLE_TIMEOUT_S = 30.0
_WRITE_BYTES = 1 << 20


async def receive(
    body: AsyncIterator[bytes], boundary: str, folder: Path, max_bytes: int, *, idle_timeout_s: float = _IDLE_TIMEOUT_S
) -> dict[str, StagedFile]:
    """Write the files of a multipart body into `folder` and return them by name.

    Args:
        body: The body as it arrives.
        boundary: Of its parts.
        folder: Empty, private; the caller removes it.
        max_bytes: Of the whole body.
        idle_timeout_s: How long nothing may arrive.

    Raises:
        AdapterRejectedError: A name, the set of names or a size is not allowed; says so before reading on.
        PayloadTooLargeError: The body is longer than `max_bytes`.
        BodyTimeoutError: Nothing arrived for too long.
        UnknownParameterError: A part is not called `files`.
        UnsupportedMediaTypeError: A part is encoded.
        InvalidRequestError: The body is not multipart, ends early, or a part's headers have two meanings.
        StoreUnavailableError: The disk does not take it.
    """
    parser = PushMultipartParser(boundary)
    receiver = _Receiver(folder)
    num_bytes = 0
    try:
        with receiver:
            async for chunk in _bounded(body, idle_timeout_s):
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise PayloadTooLargeError(f"The body is larger than {max_bytes >> 20} MiB")
                for event in parser.parse(chunk):
                    await receiver.take(event)
            parser.close()
    except MultipartError as error:
        # further arguments are what caused it, with the bytes
        message = f"The body is not whole multipart/form-data: {error.args[0]}"
        raise InvalidRequestError(message, param="body") from error
    check_file_names(list(receiver.files))
    return receiver.files


async def receive_part(
    body: AsyncIterator[bytes], path: Path, size: int, *, idle_timeout_s: float = _IDLE_TIMEOUT_S
) -> None:
    """Write a body of exactly `size` bytes to the new file `path`.

    Raises:
        InvalidRequestError: It is shorter or longer; says so before more is written.
        BodyTimeoutError: Nothing arrived for too long.
        StoreUnavailableError: The disk does not take it.
    """
    with unavailable_on_failure():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    num_bytes, waiting = 0, bytearray()
    with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123, ASYNC230 - a descriptor, no path
        async for chunk in _bounded(body, idle_timeout_s):
            num_bytes += len(chunk)
            if num_bytes > size:
                break
            waiting += chunk
            if len(waiting) >= _WRITE_BYTES:
                piece, waiting = bytes(waiting), bytearray()
                await asyncio.to_thread(_write_all, file, piece)
        await asyncio.to_thread(_write_all, file, bytes(waiting))
    if num_bytes != size:
        fault = "more" if num_bytes > size else f"{num_bytes}"
        raise InvalidRequestError(f"This part has {size} bytes, and {fault} came; send it again whole", param="body")


def _write_all(file: FileIO, piece: bytes) -> None:
    left = memoryview(piece)
    with unavailable_on_failure():
        while left:
            left = left[file.write(left) :]


def check_file_names(names: list[str], *, is_whole: bool = True) -> None:
    """Return if these are the names of an adapter's folder, or those that have come so far.

    Raises:
        AdapterRejectedError: They are not; carries the report.
    """
    report = build_report(check_names(names, is_whole=is_whole))
    failure = report.first_failure
    if failure is not None:
        raise AdapterRejectedError(report, failure.message, param=failure.subject)


async def _bounded(body: AsyncIterator[bytes], idle_timeout_s: float) -> AsyncIterator[bytes]:
    chunks = aiter(body)
    while True:
        try:
            async with asyncio.timeout(idle_timeout_s):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise BodyTimeoutError from error
        if chunk:
            yield chunk


class _Receiver:
    """Turns the parser's events into files; at most one is open."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, StagedFile] = {}
        self._folder = folder
        self._open: _Writer | None = None

    def __enter__(self) -> _Receiver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._open is not None:
            # what went wrong before is what the client is told
            with contextlib.suppress(OSError):
                self._open.close()

    async def take(self, event: MultipartSegment | bytes | bytearray | None) -> None:
        if isinstance(event, MultipartSegment):
            self._open = self._start(event)
        elif event is not None:
            assert self._open is not None, "the parser begins a part before its bytes"
            await self._open.write(bytes(event))
        elif self._open is not None:
            self.files[self._open.name] = await self._open.finish()
            self._open = None

    def _start(self, part: MultipartSegment) -> _Writer:
        name = read_filename(part)
        check_file_names([*self.files, name], is_whole=False)
        return _Writer(name, self._folder / f"part-{len(self.files)}")


class _Writer:
    """One file being written and hashed, in a thread, in pieces of about a megabyte."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path
        self._max_bytes = max_file_bytes(name)
        with unavailable_on_failure():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        # unbuffered: closing must have nothing left to write
        self._file = open(descriptor, "wb", buffering=0)  # noqa: PTH123, SIM115
        self._hash = hashlib.sha256()
        self._waiting = bytearray()
        self._size = 0

    async def write(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size > self._max_bytes:
            message = f"{self.name} is larger than {self._max_bytes} bytes."
            check = Check("file_size", "fail", message, self.name)
            raise AdapterRejectedError(build_report([check]), message, param=self.name)
        self._waiting += chunk
        if len(self._waiting) >= _WRITE_BYTES:
            await self._flush()

    async def finish(self) -> StagedFile:
        await self._flush()
        with unavailable_on_failure():
            self.close()
        return StagedFile(self._path, self._size, self._hash.hexdigest())

    def close(self) -> None:
        self._file.close()

    async def _flush(self) -> None:
        piece, self._waiting = bytes(self._waiting), bytearray()
        await asyncio.to_thread(self._write_piece, piece)

    def _write_piece(self, piece: bytes) -> None:
        self._hash.update(piece)
        _write_all(self._file, piece)
