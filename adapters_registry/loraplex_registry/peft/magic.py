"""What a file really is, by its first bytes, whatever its name claims.

Knows the formats that people upload by mistake or on purpose; it never decodes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loraplex_registry.peft.file_rule import CONVERT_COMMAND, is_side_file
from loraplex_registry.peft.findings import Findings

PEEK_BYTES = 512

_LFS_PREFIX = b"version https://git-lfs"
_FOREIGN = (
    (b"GGUF", "a GGUF file; upload the PEFT folder that it was made from"),
    (b"\x89HDF", "an HDF5 file; save the adapter with PEFT"),
    (b"\x93NUMPY", "a NumPy file; save the adapter with PEFT"),
    (b"\x1f\x8b", "a gzip archive; upload the files it holds"),
    (b"BZh", "a bzip2 archive; upload the files it holds"),
    (b"\xfd7zXZ", "an xz archive; upload the files it holds"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; upload the files it holds"),
    (b"7z\xbc\xaf", "a 7z archive; upload the files it holds"),
    (b"<", "an HTML or XML page; download the weights again"),
    (b"{", "JSON text; upload the weights themselves"),
)
_ZIP = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
_ARCHIVES = (b"\x1f\x8b", b"BZh91AY&SY", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")


def find_foreign_format(head: bytes) -> list[tuple[str, str]]:
    """Recognise a file that is not safetensors.

    Args:
        head: the first `PEEK_BYTES` bytes of the file, or all of it.

    Returns:
        Pairs of check name and what to do; empty where the start could be that of a safetensors file. A pickle fails
        both `pickle` and `format`.
    """
    if head.startswith(_LFS_PREFIX):
        return [("lfs_pointer", "The file is a Git LFS pointer, not the weights; run `git lfs pull` and upload again.")]
    if _looks_like_safetensors(head):
        return []
    if head.startswith(_ZIP) or _looks_like_pickle(head):
        return [
            ("pickle", f"The file is a PyTorch pickle or a zip and is never opened; convert it: {CONVERT_COMMAND}"),
            ("format", "The file is a pickle or a zip, not safetensors; save it with PEFT's save_pretrained."),
        ]
    if head[257:262] == b"ustar":
        return [("format", "The file is a tar archive; upload the files it holds.")]
    return [("format", f"The file is {what}.") for magic, what in _FOREIGN if head.startswith(magic)][:1]


def find_foreign_text(head: bytes) -> list[tuple[str, str]]:
    """Recognise a file that should be text and is not.

    Args:
        head: the first `PEEK_BYTES` bytes of the file, or all of it.

    Returns:
        At most one pair of check name and what to do, as a message that follows the file's name.
    """
    if head.startswith(_LFS_PREFIX):
        return [("lfs_pointer", "is a Git LFS pointer, not the content; run `git lfs pull` and upload again.")]
    if head.startswith(_ZIP) or _looks_like_pickle(head):
        return [("pickle", "is a pickle or a zip and is never opened; upload the text it should be.")]
    if head.startswith(_ARCHIVES) or b"\0" in head:
        return [("format", "is an archive or other binary data; upload the text it should be, in UTF-8.")]
    return []


def judge_side_files(files: Mapping[str, Path], findings: Findings) -> None:
    """Judge the first bytes of the files that are kept unread (`pickle`, `lfs_pointer`, `format`)."""
    for name, path in files.items():
        if is_side_file(name):
            with path.open("rb") as file:
                judge_text(name, file.read(PEEK_BYTES), findings)


def judge_text(name: str, head: bytes, findings: Findings) -> bool:
    """Judge the first bytes of a file that should be text, and return whether they may be."""
    foreign = find_foreign_text(head)
    for check, message in foreign:
        findings.fail(check, f"{name} {message}", name)
    return not foreign


def _looks_like_safetensors(head: bytes) -> bool:
    """A length below 2^32 and an opening brace: what pickles, archives and texts never have."""
    return len(head) > 8 and head[4:8] == b"\0\0\0\0" and head[8:9] == b"{"


def _looks_like_pickle(head: bytes) -> bool:
    return len(head) > 2 and head[0] == 0x80 and head[1] in range(2, 6)
