"""How many tokens a request may cost, before anybody counts them: the gateway has no tokenizer. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loraplex_registry.wire.limits import MAX_LIMIT

_BYTES_PER_TOKEN = 3
_TOKENS_PER_MESSAGE = 8
_DEFAULT_MAX_TOKENS = 256


def estimate_tokens(fields: Mapping[str, Any]) -> int:
    """Return what a generation reserves.

    *Semantics*: `ceil(UTF-8 bytes / 3) + 8 per message + n x (max_tokens or 256)`. Bytes are those of messages and
    prompts, and of tools as JSON, as which templates write them; a token id is one token. Each of several prompts has
    `n` answers.

    Args:
        fields: The body, whose `n` and lengths are whole numbers where they are given; nothing else of it is checked.
    """
    messages = fields.get("messages")
    num_messages = len(messages) if isinstance(messages, list) else 0
    num_bytes = sum(_count_bytes(fields.get(name)) for name in ("messages", "prompt"))
    num_bytes += _count_json_bytes(fields.get("tools"))
    length = fields.get("max_completion_tokens") or fields.get("max_tokens") or _DEFAULT_MAX_TOKENS
    num_answers = max(1, fields.get("n") or 1) * _count_prompts(fields.get("prompt"))
    prompt = -(-num_bytes // _BYTES_PER_TOKEN) + _TOKENS_PER_MESSAGE * num_messages
    return min(MAX_LIMIT, prompt + num_answers * max(0, length))


def _count_bytes(value: Any) -> int:
    """Return the bytes of all strings within; roles are in every template and count with their message."""
    num_bytes, left = 0, [value]
    while left:
        found = left.pop()
        if isinstance(found, str):
            num_bytes += len(found.encode("utf-8", "surrogatepass"))
        elif isinstance(found, list):
            left.extend(found)
        elif isinstance(found, dict):
            left.extend(item for name, item in found.items() if name != "role")
        elif found is not None:
            num_bytes += _BYTES_PER_TOKEN
    return num_bytes


def _count_json_bytes(value: Any) -> int:
    """Return the bytes of a value with the names in it, which are the client's too."""
    if not value:
        return 0
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"))


def _count_prompts(prompt: Any) -> int:
    """A list of strings or of lists of token ids is several prompts, a list of token ids is one."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return len(prompt)
    return 1
