"""The bytes of every token of a byte-level or SentencePiece vocabulary; special tokens have names and no bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from loraplex_engine.errors import BaseUnsupportedError

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class TokenTable:
    """The bytes of each token id, and whether an answer's first space belongs to the tokenizer, not to the text."""

    def __init__(
        self,
        token_to_bytes: dict[int, bytes],
        *,
        has_leading_space: bool,
        special_to_name: dict[int, str] | None = None,
    ) -> None:
        self._token_to_bytes = token_to_bytes
        self._special_to_name = special_to_name or {}
        self.has_leading_space = has_leading_space
        self.longest_token_bytes = max(map(len, token_to_bytes.values()), default=1)

    def get(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for special tokens and for padding of the vocabulary."""
        return self._token_to_bytes.get(token_id, b"")

    def get_name(self, token_id: int) -> str:
        """Return what the vocabulary calls a special token; nothing for others."""
        return self._special_to_name.get(token_id, "")

    @property
    def special_ids(self) -> dict[str, int]:
        """The special tokens by name."""
        return {name: token_id for token_id, name in self._special_to_name.items()}


def build_token_table(tokenizer: dict[str, Any]) -> TokenTable:
    """Read the bytes of all tokens from a parsed `tokenizer.json`.

    Raises:
        BaseUnsupportedError: Its decoder is neither byte-level nor SentencePiece-like.
    """
    decoders = list(_walk(tokenizer.get("decoder")))
    kinds = {item["type"] for item in decoders}
    if "ByteLevel" in kinds:
        read: Callable[[str], bytes] = _read_byte_level
    elif kinds & {"Metaspace", "ByteFallback"}:
        read = _read_sentencepiece
    else:
        raise BaseUnsupportedError(f"The base's tokenizer has a decoder that is not served ({sorted(kinds)}).")
    table = {token_id: read(token) for token, token_id in _vocabulary(tokenizer["model"])}
    added = tokenizer.get("added_tokens", ())
    names = {token["id"]: token["content"] for token in added if token["special"]}
    table |= {token["id"]: b"" if token["special"] else read(token["content"]) for token in added}
    has_leading_space = any(map(_strips_leading_space, decoders))
    return TokenTable(table, has_leading_space=has_leading_space, special_to_name=names)


def _walk(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is not None:
        yield decoder
        for inner in decoder.get("decoders", ()):
            yield from _walk(inner)


def _vocabulary(model: dict[str, Any]) -> list[tuple[str, int]]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return list(vocabulary.items())
    return [(piece, index) for index, (piece, _score) in enumerate(vocabulary)]


def _strips_leading_space(decoder: dict[str, Any]) -> bool:
    if decoder["type"] == "Strip":
        return bool(decoder.get("content") == " " and decoder.get("start"))
    return bool(decoder["type"] == "Metaspace" and decoder.get("prepend_scheme", "always") != "never")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print are themselves, the others follow from U+0100 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + index): byte for index, byte in enumerate(others)}


_CHAR_TO_BYTE = _byte_level_alphabet()
# what is not in the alphabet must not pass for a byte
_CODE_TO_LATIN = dict.fromkeys(range(256), "\uffff") | {ord(char): chr(byte) for char, byte in _CHAR_TO_BYTE.items()}


def _read_byte_level(token: str) -> bytes:
    try:
        return token.translate(_CODE_TO_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        # an added token is plain text, not written in the alphabet
        return token.encode()


def _read_sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()
