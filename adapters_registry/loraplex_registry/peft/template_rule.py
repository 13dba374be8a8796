"""What becomes of the chat template that an adapter brings: one chat is rendered with it, in a process with limits."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from loraplex_registry.peft.confined import run_confined
from loraplex_registry.peft.errors import JsonError
from loraplex_registry.peft.file_rule import MAX_TEMPLATE_BYTES, TEMPLATE_FILE
from loraplex_registry.peft.findings import Findings
from loraplex_registry.peft.magic import find_foreign_text
from loraplex_registry.peft.strict_json import parse_objects
from loraplex_registry.peft.unreadable import UNREADABLE

_TOKENIZER_CONFIG = "tokenizer_config.json"
_MAX_TOKENIZER_CONFIG_BYTES = 4 * 1024**2


# the engine gives the base's own; a base that lacks one of them is seen at the chat
_SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_QUESTION = "What is the capital of France?"
_WALL_LIMIT_S = 10.0


def judge_template(files: Mapping[str, Path], findings: Findings, *, is_rendered: bool = True) -> None:
    """Judge the adapter's own chat template (`template`): text that renders a user's question within limits.

    Args:
        files: the folder's files by name.
        findings: where the check goes.
        is_rendered: else the text is only read, as something else renders it.

    Raises:
        OSError: a file cannot be read, or no helper process can be started.
    """
    if TEMPLATE_FILE in files:
        _judge_own(files[TEMPLATE_FILE], findings, is_rendered=is_rendered)
    elif _TOKENIZER_CONFIG in files and _holds_template(files[_TOKENIZER_CONFIG]):
        findings.warn(
            "template",
            f"The chat template in {_TOKENIZER_CONFIG} is not used, but the base model's; to have chats rendered with "
            f"it, upload it as {TEMPLATE_FILE}.",
            _TOKENIZER_CONFIG,
        )
    findings.settle("template")


def _judge_own(path: Path, findings: Findings, *, is_rendered: bool) -> None:
    data = _read_some(path, MAX_TEMPLATE_BYTES)
    # bytes of a pickle or the like are reported as that, too large a file as that
    if find_foreign_text(data) or (not data and path.stat().st_size):
        return
    try:
        source = data.decode()
    except UnicodeDecodeError:
        findings.fail("template", f"{TEMPLATE_FILE} is not UTF-8; save it as UTF-8 text.", TEMPLATE_FILE)
        return
    fault = _find_fault(source) if is_rendered else ""
    if fault:
        message = f"{TEMPLATE_FILE} {fault}; mend it, or leave it out to have chats rendered with the base's."
        findings.fail("template", message, TEMPLATE_FILE)


def _find_fault(source: str) -> str:
    """What is wrong with a template, as the end of a sentence; empty if nothing is."""
    # here, since only adapters with a template need jinja
    from loraplex_registry.peft.template_process import RenderAnswer, RenderJob, run

    job = msgspec.json.encode(RenderJob(source, _QUESTION, _SPECIAL_TOKENS))
    command = [sys.executable, "-P", "-W", "ignore", "-m", "loraplex_registry.peft.template_process"]
    outcome = run_confined(run, command, job, _WALL_LIMIT_S)
    if outcome.code or outcome.is_late:
        return "takes more than 250 ms of processor time or 512 MiB of memory for a plain question of a user"
    try:
        return msgspec.json.decode(outcome.answer, type=RenderAnswer).fault
    except UNREADABLE:
        # what has broken out may say anything
        return "cannot be rendered"


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
