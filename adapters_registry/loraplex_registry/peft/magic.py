"""What a file that claims to be safetensors really is, by its first bytes.

Knows the formats that people upload by mistake or on purpose; it never decodes them.
"""

from __future__ import annotations

from loraplex_registry.peft.file_rule import CONVERT_COMMAND

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
    if head.startswith(b"PK\x03\x04") or _looks_like_pickle(head):
        return [
            ("pickle", f"The file is a PyTorch pickle or a zip and is never opened; convert it: {CONVERT_COMMAND}"),
            ("format", "The file is a pickle or a zip, not safetensors; save it with PEFT's save_pretrained."),
        ]
    if head[257:262] == b"ustar":
        return [("format", "The file is a tar archive; upload the files it holds.")]
    return [("format", f"The file is {what}.") for magic, what in _FOREIGN if head.startswith(magic)][:1]


def _looks_like_safetensors(head: bytes) -> bool:
    """A length below 2^32 and an opening brace: what pickles, archives and texts never have."""
    return len(head) > 8 and head[4:8] == b"\0\0\0\0" and head[8:9] == b"{"


def _looks_like_pickle(head: bytes) -> bool:
    return len(head) > 2 and head[0] == 0x80 and head[1] in range(2, 6)
