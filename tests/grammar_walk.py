"""Follows a grammar byte by byte as a model without a mind would: what it allows, and texts drawn from it."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

CLOSING = frozenset(b'"]}')


@functools.cache
def bytes_tokenizer() -> Any:
    return LLTokenizer("byte")


def allows(grammar: str, text: str) -> bool:
    """Whether a text is one that the grammar describes, from beginning to end."""
    matcher = LLMatcher(bytes_tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    is_taken: bool = matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()
    return is_taken


def begins(grammar: str, text: str) -> bool:
    """Whether a text, but for a character that was cut, is the beginning of one that the grammar describes."""
    matcher = LLMatcher(bytes_tokenizer(), grammar, log_level=0)
    return bool(matcher.consume_tokens(list(text.removesuffix("\ufffd").encode())))


def draw_text(grammar: str, rng: random.Random, *, max_bytes: int = 1500) -> bytes | None:
    """Return a random text of the grammar, None if it did not come to an end."""
    tokenizer = bytes_tokenizer()
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    text = bytearray()
    while len(text) < max_bytes:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert allowed, f"a dead end after {bytes(text)!r}: {matcher.get_error()}"
        closing = [token for token in allowed if token in CLOSING or token == tokenizer.eos_token]
        plain = [token for token in allowed if 32 <= token < 127]
        if closing and rng.random() < 0.4:
            token = rng.choice(closing)
        else:
            token = rng.choice(plain if plain and rng.random() < 0.8 else allowed)
        if token == tokenizer.eos_token:
            return bytes(text)
        text.append(token)
        assert matcher.consume_token(token), matcher.get_error()
        if matcher.is_stopped():
            return bytes(text)
    return None
