"""Sending a PEFT folder as multipart, read from disk while it is sent; which files belong to it is decided here."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from loraplex.client.errors import ClientError

Progress = Callable[[int], None]
REQUIRED_FILES = ("adapter_config.json", "adapter_model.safetensors")
OPTIONAL_FILES = (
    "README.md",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""What an adapter's folder may hold besides; a download asks for each."""


class CountingFile(io.FileIO):
    """A file that tells how many bytes were read from it."""

    def __init__(self, path: Path, on_read: Progress) -> None:
        super().__init__(path, "rb")
        self._on_read = on_read

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as a file does, and report the count."""
        chunk = super().read(-1 if size is None else size) or b""
        self._on_read(len(chunk))
        return chunk


def list_files(folder: Path) -> list[Path]:
    """Return the files that are sent: all in the folder itself but hidden ones (`.gitattributes`, `.DS_Store`).

    Raises:
        ClientError: It is no folder, or holds no file.
    """
    if not folder.is_dir():
        raise ClientError(
            f"{folder} is not a folder; give the folder that PEFT's save_pretrained wrote.", code="file_set"
        )
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    if not files:
        raise ClientError(
            f"{folder} holds no files; give the folder that PEFT's save_pretrained wrote.", code="file_set"
        )
    return files
