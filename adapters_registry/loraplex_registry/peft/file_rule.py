"""Which files an adapter's folder may hold, and how large they may be.

Names are judged before any byte is stored; nothing here opens a pickle, an archive or a link.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from loraplex_registry.peft.findings import Findings, listed, show
from loraplex_registry.peft.report import Check

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
TEMPLATE_FILE = "chat_template.jinja"

MAX_FILES = 16
MAX_CONFIG_BYTES = 256 * 1024
MAX_TEMPLATE_BYTES = 64 * 1024
MAX_FILE_BYTES = 8 * 1024**3

_REQUIRED = (CONFIG_FILE, WEIGHTS_FILE)
_KEPT = (
    "README.md",
    TEMPLATE_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_TOKENIZER_FILE = re.compile(r"tokenizer[A-Za-z0-9_.-]{0,64}\.json|tokenizer\.json")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")

CONVERT_COMMAND = (
    'python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('adapter_model.bin', weights_only=True), 'adapter_model.safetensors')\""
)


def max_file_bytes(name: str) -> int:
    """The largest size in bytes that a file of this name may have."""
    return {CONFIG_FILE: MAX_CONFIG_BYTES, TEMPLATE_FILE: MAX_TEMPLATE_BYTES}.get(name, MAX_FILE_BYTES)


def check_names(filenames: Iterable[str], *, is_whole: bool = True) -> list[Check]:
    """Judge the names of a folder's files before their bytes are stored.

    Args:
        filenames: the names exactly as the client sent them.
        is_whole: these are all of them; else the required ones may still come.

    Returns:
        The checks `file_name`, `file_set` and `pickle`: passes, or one failing check for each bad name.
    """
    findings = Findings()
    judge_names(list(filenames), findings, is_whole=is_whole)
    return findings.checks()


def is_side_file(name: str) -> bool:
    """Whether a file of this name is kept without being used."""
    return name in _KEPT or _TOKENIZER_FILE.fullmatch(name) is not None


def judge_names(names: list[str], findings: Findings, *, is_whole: bool = True) -> None:
    """As `check_names`, into findings."""
    good = [name for name in names if _judge_name(name, findings)]
    for name in good:
        _judge_membership(name, findings)
    for name in _REQUIRED:
        if is_whole and name not in good:
            findings.fail("file_set", f"{name} is missing; upload the folder that save_pretrained wrote.", name)
    if len(names) > MAX_FILES:
        findings.fail("file_set", f"There are more than {MAX_FILES} files; upload at most {MAX_FILES}.", "files")
    for name in sorted({name for name in good if good.count(name) > 1}):
        findings.fail("file_set", f"{name} is there twice; upload it once.", name)
    findings.settle("file_name", "file_set", "pickle")


def _judge_name(name: str, findings: Findings) -> bool:
    if _PLAIN_NAME.fullmatch(name) and ".." not in name:
        return True
    findings.fail("file_name", f"The file name {show(name)} is not a plain one; send it as PEFT writes it.", "files")
    return False


def _judge_membership(name: str, findings: Findings) -> None:
    if name.lower().endswith(_PICKLE_SUFFIXES):
        what_to_do = f"convert it: {CONVERT_COMMAND}" if name.startswith("adapter_model.") else "leave it out"
        findings.fail("pickle", f"{name} may hold a pickle and is never opened; {what_to_do}", name)
    elif name not in _REQUIRED and not is_side_file(name):
        allowed = listed([*_REQUIRED, *_KEPT, "tokenizer*.json"], limit=16)
        findings.fail("file_set", f"{name} does not belong to an adapter; upload only {allowed}.", name)


def judge_sizes(files: Mapping[str, Path], findings: Findings) -> None:
    """Judge the sizes of the files on disk (`file_size`)."""
    for name, path in files.items():
        size, limit = path.stat().st_size, max_file_bytes(name)
        if size > limit:
            findings.fail("file_size", f"{name} has {size} bytes; at most {limit} are allowed.", name)
    findings.settle("file_size")
