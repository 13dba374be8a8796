"""What requests share that begin alike: a key by which a replica is preferred that has computed such a beginning.

Nothing is recognised by it but equality: a hash, of one tenant's requests only. No text is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

_MAX_LEN = 1024
_KEY_BYTES = 12
_MAX_ID = 1 << 32


def find_prefix(fields: dict[str, Any], tenant_id: str | None) -> str:
    """Return the key of a call: of its `prompt_cache_key`, else of how its prompt or its first messages begin.

    Messages count up to the first one of the user, so that the turns of a conversation have one key. Empty if there is
    nothing to go by; what is no text is the engine's to judge.
    """
    given = fields.get("prompt_cache_key")
    text = given[:_MAX_LEN] if isinstance(given, str) else _read_beginning(fields)
    if not text:
        return ""
    salt = fields.get("cache_salt")
    parts = (tenant_id or "", salt if isinstance(salt, str) else "", text)
    key = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        key.update(b"%d:%b" % (len(encoded), encoded))
    return key.hexdigest()


def _read_beginning(fields: dict[str, Any]) -> str:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:_MAX_LEN]
    if isinstance(prompt, list):
        return ",".join(str(token) for token in prompt[: _MAX_LEN // 4] if isinstance(token, int) and token < _MAX_ID)
    return "\n".join(_read_messages(fields.get("messages")))[:_MAX_LEN]


def _read_messages(messages: Any) -> Iterator[str]:
    length = 0
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            return
        text = _read_content(message.get("content"))
        is_user = message.get("role") == "user"
        yield f"{'user' if is_user else 'other'}:{text}"
        length += len(text)
        if is_user or length >= _MAX_LEN:
            return


def _read_content(content: Any) -> str:
    if isinstance(content, str):
        return content[:_MAX_LEN]
    parts = content[:_MAX_LEN] if isinstance(content, list) else []
    texts = (part["text"][:_MAX_LEN] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
    return "\n".join(texts)[:_MAX_LEN]
