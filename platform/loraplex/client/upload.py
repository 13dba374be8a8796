"""Sending a PEFT folder as multipart, read from disk while it is sent; which files belong to it is decided here."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loraplex.client.errors import ClientError
from loraplex_registry.wire.adapter import VersionView

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
_, _WEIGHTS_FILE = REQUIRED_FILES
_PICKLE_FILE, _ADAPTER_PREFIX = "adapter_model.bin", "adapter_"


@dataclass(frozen=True)
class FolderFiles:
    """What a folder holds: the files that are sent, and the names of those that no adapter needs."""

    sent: list[Path]
    left_out: list[str]


@dataclass(frozen=True)
class Upload:
    """What became of an upload; `is_new` is False where a version had the same content already."""

    version: VersionView
    is_new: bool


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


def choose_files(folder: Path) -> FolderFiles:
    """Return what of a training's output folder is sent: optimizer states, logs and the like stay here.

    Raises:
        ClientError: It is no adapter's folder, or its weights are a pickle only.
    """
    from loraplex_registry.peft.file_rule import CONVERT_COMMAND

    files = list_files(folder)
    names = {path.name for path in files}
    if not any(name.startswith(_ADAPTER_PREFIX) for name in names):
        raise ClientError(
            f"{folder} is no adapter's folder: it holds neither {' nor '.join(REQUIRED_FILES)}. Give the folder that "
            "PEFT's save_pretrained wrote.",
            code="file_set",
        )
    if _PICKLE_FILE in names and _WEIGHTS_FILE not in names:
        raise ClientError(
            f"The weights in {folder} are a pickle only, which is never opened. Convert them, in that folder: "
            f"{CONVERT_COMMAND}",
            code="adapter_rejected",
            param=_PICKLE_FILE,
        )
    sent = [path for path in files if _is_sent(path.name)]
    return FolderFiles(sent, sorted(names - {path.name for path in sent}))


def _is_sent(name: str) -> bool:
    """Say whether the registry knows the name, or should judge it: nothing of the adapter itself is left out."""
    from loraplex_registry.peft.file_rule import check_names

    if name in REQUIRED_FILES:
        return True
    if name.startswith(_ADAPTER_PREFIX):
        return name != _PICKLE_FILE
    return all(check.verdict == "pass" for check in check_names([*REQUIRED_FILES, name]))
