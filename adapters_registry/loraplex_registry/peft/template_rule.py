"""What becomes of the chat template that an adapter brings. Nothing here runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loraplex_registry.peft.errors import JsonError
from loraplex_registry.peft.file_rule import MAX_TEMPLATE_BYTES, TEMPLATE_FILE
from loraplex_registry.peft.findings import Findings
from loraplex_registry.peft.magic import find_foreign_text
from loraplex_registry.peft.strict_json import parse_objects

_TOKENIZER_CONFIG = "tokenizer_config.json"
_MAX_TOKENIZER_CONFIG_BYTES = 4 * 1024**2


def judge_template(files: Mapping[str, Path], findings: Findings) -> None:
    """Judge the adapter's own chat template, with which its chats are rendered: that it is text.

    Whether the text is a template shows at the first chat, in a process with limits; nothing here reads it.
    """
    if TEMPLATE_FILE in files:
        data = _read_some(files[TEMPLATE_FILE], MAX_TEMPLATE_BYTES)
        try:
            data.decode()
        except UnicodeDecodeError:
            # bytes of a pickle or the like are reported as that
            if not find_foreign_text(data):
                findings.fail("template", f"{TEMPLATE_FILE} is not UTF-8; save it as UTF-8 text.", TEMPLATE_FILE)
    elif _TOKENIZER_CONFIG in files and _holds_template(files[_TOKENIZER_CONFIG]):
        findings.warn(
            "template",
            f"The chat template in {_TOKENIZER_CONFIG} is not used, but the base model's; to have chats rendered with "
            f"it, upload it as {TEMPLATE_FILE}.",
            _TOKENIZER_CONFIG,
        )
    findings.settle("template")


def _read_some(path: Path, max_bytes: int) -> bytes:
    """Return a file's bytes, none if there are more: its size is another check's business."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    return data if len(data) <= max_bytes else b""


def _holds_template(path: Path) -> bool:
    try:
        config = parse_objects(_read_some(path, _MAX_TOKENIZER_CONFIG_BYTES))
    except JsonError:
        return False
    return isinstance(config, dict) and config.get("chat_template") is not None
