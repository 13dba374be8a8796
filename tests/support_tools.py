"""Tools, a tokenizer with the marks of all call formats, and a model that picks any token that its grammar allows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from loraplex_engine.guide.vocabulary import build_vocabulary
from loraplex_engine.wire.openai import FunctionSpec, Tool
from toy_tokenizers import byte_level

MARKS = ("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|python_tag|>")
_END = "<|im_end|>"

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
}
SEARCH = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 3},
        "filter": {"type": "object", "properties": {"exact": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["words"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None = None, *, strict: bool = False) -> Tool:
    return Tool(FunctionSpec(name, parameters=parameters, strict=strict), "function")


TOOLS = (tool("get_weather", WEATHER), tool("search", SEARCH), tool("get_time"))


@cache
def marked_tokenizer() -> Tokenizer:
    backend = Tokenizer.from_str(byte_level().to_str())
    backend.add_special_tokens(list(MARKS))
    return backend


@cache
def special_ids() -> dict[str, int]:
    return {mark: marked_tokenizer().token_to_id(mark) for mark in MARKS}


@cache
def matcher_tokenizer() -> LLTokenizer:
    backend = marked_tokenizer()
    return build_vocabulary(backend.to_str(), backend.get_vocab_size(), [backend.token_to_id(_END)])


class RandomModel:
    """Writes under a grammar: any token that is allowed, the end at once or later."""

    def __init__(self, grammar: str, seed: int) -> None:
        self._matcher = LLMatcher(matcher_tokenizer(), grammar)
        assert not self._matcher.is_error(), self._matcher.get_error()
        self._random = random.Random(seed)
        self._end = marked_tokenizer().token_to_id(_END)
        self._names = {number: mark for mark, number in special_ids().items()}

    def write(self, max_tokens: int, *, end_chance: float = 0.3) -> tuple[str, bool]:
        """Return the text, special tokens shown, and whether it came to its end."""
        text = b""
        for _ in range(max_tokens):
            allowed = self._allowed()
            ends = self._end in allowed and (len(allowed) == 1 or self._random.random() < end_chance)
            if ends:
                return text.decode(errors="replace"), True
            token = self._random.choice([one for one in allowed if one != self._end])
            assert self._matcher.consume_token(token), self._matcher.get_error()
            text += self._bytes([token])
        return text.decode(errors="replace"), False

    def accepts(self, text: str) -> bool:
        """Whether the whole text, marks as special tokens, may be an answer."""
        tokens = marked_tokenizer().encode(text, add_special_tokens=False).ids
        for token in tokens:
            if token not in self._allowed():
                return False
            assert self._matcher.consume_token(token)
        return self._end in self._allowed()

    def _allowed(self) -> list[int]:
        mask = self._matcher.compute_bitmask()
        assert not self._matcher.is_error(), self._matcher.get_error()
        return [8 * place + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        name = self._names.get(tokens[0])
        return name.encode() if name is not None else matcher_tokenizer().decode_bytes(list(tokens))
