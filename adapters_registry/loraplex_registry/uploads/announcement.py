"""What a client announces of a large upload: its files, cut into parts. Judged before a byte of it is taken."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence

import msgspec

from loraplex_registry.errors import AdapterRejectedError, InvalidRequestError, PayloadTooLargeError
from loraplex_registry.peft.file_rule import MAX_FILE_BYTES, max_file_bytes
from loraplex_registry.peft.report import Check, build_report
from loraplex_registry.storage.store import Part, PartPlace
from loraplex_registry.uploads.receive import check_file_names

MIN_PART_BYTES = 8 << 20
MAX_PART_BYTES = 64 << 20
MAX_LARGE_BYTES = MAX_FILE_BYTES + (1 << 30)
"""All files of an upload together: the largest one there may be, and a gigabyte beside it."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_EMPTY = hashlib.sha256().hexdigest()


class FileAnnouncement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file: its size in bytes and sha256 in hex, the size of its parts (the last is smaller) and their sha256."""

    name: str
    size: int
    sha256: str
    part_size: int
    part_sha256: tuple[str, ...]


class UploadAnnouncement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST .../uploads`."""

    files: tuple[FileAnnouncement, ...]

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(file.size for file in self.files)


def check_announcement(announced: UploadAnnouncement) -> None:
    """Return if these files may be sent, in these parts.

    Raises:
        AdapterRejectedError: A name, the set of names or a size is not allowed; carries the report.
        InvalidRequestError: Sizes, hashes and parts do not fit together.
        PayloadTooLargeError: The files are too large together.
    """
    for index, file in enumerate(announced.files):
        _check_parts(file, f"files[{index}]")
    check_file_names([file.name for file in announced.files])
    for file in announced.files:
        limit = max_file_bytes(file.name)
        if file.size > limit:
            message = f"{file.name} has {file.size} bytes; at most {limit} are allowed."
            raise AdapterRejectedError(
                build_report([Check("file_size", "fail", message, file.name)]), message, param=file.name
            )
    if announced.size_bytes > MAX_LARGE_BYTES:
        raise PayloadTooLargeError(f"The files have more than {MAX_LARGE_BYTES >> 20} MiB together", param="files")


def _check_parts(file: FileAnnouncement, at: str) -> None:
    if file.size < 0:
        raise InvalidRequestError("size is the number of the file's bytes", param=f"{at}.size")
    if not MIN_PART_BYTES <= file.part_size <= MAX_PART_BYTES:
        raise InvalidRequestError(
            f"part_size is {MIN_PART_BYTES} to {MAX_PART_BYTES} bytes; the last part of a file is smaller",
            param=f"{at}.part_size",
        )
    num_parts = -(-file.size // file.part_size)
    if len(file.part_sha256) != num_parts:
        raise InvalidRequestError(
            f"{file.size} bytes in parts of {file.part_size} are {num_parts} parts; give the sha256 of each",
            param=f"{at}.part_sha256",
        )
    for name, hashes in (("sha256", (file.sha256,)), ("part_sha256", file.part_sha256)):
        if any(_SHA256.fullmatch(each) is None for each in hashes):
            raise InvalidRequestError("A sha256 is 64 hex digits in lower case", param=f"{at}.{name}")
    whole = _EMPTY if num_parts == 0 else file.part_sha256[0] if num_parts == 1 else file.sha256
    if whole != file.sha256:
        raise InvalidRequestError("The sha256 of the file is not that of its only part", param=f"{at}.sha256")


def read_files(files: Sequence[object]) -> tuple[FileAnnouncement, ...]:
    """Return the files that an upload's row holds."""
    return msgspec.convert(files, tuple[FileAnnouncement, ...])


def cut(files: Sequence[FileAnnouncement]) -> Iterator[Part]:
    """Yield the parts of all files, in order."""
    for index, file in enumerate(files):
        yield from cut_file(index, file)


def cut_file(index: int, file: FileAnnouncement) -> Iterator[Part]:
    """Yield the parts of one file, in order."""
    for number, sha256 in enumerate(file.part_sha256):
        size = min(file.part_size, file.size - number * file.part_size)
        yield Part(PartPlace(index, number), size, sha256)
