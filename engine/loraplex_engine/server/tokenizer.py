"""Token ids of prompts: the base's `tokenizer.json`, read as `transformers` reads it.

`Tokenizer` is read-only after it is made and may be used from a worker thread. In a chat the text of a special token is
plain text (`control_token`); in a completion's prompt it is the special token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from loraplex_engine.errors import BaseUnsupportedError, InvalidRequestError
from loraplex_engine.server.control_token import build_pattern
from loraplex_engine.token_table import TokenTable, build_token_table
from loraplex_registry.peft.unreadable import UNREADABLE

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# a normaliser may make text shorter (composed characters): at most by this factor
_NORMALISER_SHRINKS = 4


class Tokenizer:
    """Encodes prompts for one base."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer of the base in `folder`.

        Raises:
            BaseUnsupportedError: A file of it is damaged, or is no tokenizer that can be served.
            OSError: It cannot be read.
        """
        self.folder = folder
        path = folder / "tokenizer.json"
        content = path.read_bytes()
        config = read_json_object(folder / "tokenizer_config.json")
        self.special_tokens = _named_tokens(config, read_json_object(folder / "special_tokens_map.json"))
        """Their names (`bos_token` and so on) and texts."""
        try:
            self._tokenizer = _build_tokenizer(content.decode(), self.special_tokens)
            self.table: TokenTable = build_token_table(msgspec.json.decode(content))
            self._newline_ids = self._encode("\n")
        except BaseUnsupportedError:
            raise
        # the library has no error of its own for what it cannot read
        except Exception as error:
            raise BaseUnsupportedError(f"{path} is not a tokenizer that can be read: {error}.") from error
        self.special = build_pattern(self._control_tokens(lambda _: False))
        """Matches the special tokens."""
        shrink = _NORMALISER_SHRINKS if self._tokenizer.normalizer is not None else 1
        self._most_bytes_per_token = self.table.longest_token_bytes * shrink

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens in `text`, without tokenising it."""
        return -(-len(text.encode()) // self._most_bytes_per_token)

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a completion's prompt; BOS as `tokenizer.json` says (transformers goes by it too)."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def find_starts(self, text: str) -> list[int]:
        """Return where in `text` each token of `encode_prompt` begins; what it adds itself has no length."""
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=True)[0]
        starts: list[int] = []
        end = 0
        for (first, last), is_added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            # a tokenizer may leave spaces out of its offsets; tokens of one character share its place
            starts.append(end if is_added else min(end, first))
            end = end if is_added else max(end, last)
        return starts

    def encode_chat(self, pieces: Sequence[str | None], *, limit: int) -> list[int]:
        """Return the ids of a rendered chat.

        Args:
            pieces: what the template wrote, a control token that is plain text, what the template wrote, and so on.
            limit: Encoding may stop once more ids than this are there.

        Raises:
            InvalidRequestError: The model cannot read a control token as plain text.
        """
        ids = self._encode(pieces[0] or "")
        plain: dict[str, list[int]] = {}
        for index, piece in enumerate(pieces[1:], 1):
            if not piece or len(ids) > limit:
                continue
            if index % 2 == 0:
                ids += self._encode_inside(piece)
                continue
            if piece not in plain:
                plain[piece] = self._encode_control_as_text(piece)
            ids += plain[piece]
        return ids

    def control_pattern(self, literal_text: str) -> re.Pattern[str]:
        """Match the special tokens and the added tokens that a template writes, whose text is `literal_text`."""
        return build_pattern(self._control_tokens(lambda content: content in literal_text))

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        # a batch of one, since only batches let go of the interpreter's lock
        return list(self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def _encode_control_as_text(self, token: str) -> list[int]:
        ids = self._encode_inside(token, is_plain=True)
        if self._tokenizer.token_to_id(token) in ids:
            raise InvalidRequestError(f"This model cannot read {token!r} as plain text.", param="messages")
        return ids

    def _encode_inside(self, piece: str, *, is_plain: bool = False) -> list[int]:
        """Encode text that does not begin the prompt: behind a newline, so that no prefix space is added."""
        encode = self._encode_plain if is_plain else self._encode
        ids = encode("\n" + piece)
        size = len(self._newline_ids)
        return ids[size:] if ids[:size] == self._newline_ids else encode(piece)

    def _encode_plain(self, text: str) -> list[int]:
        """Encode without looking for any added token."""
        backend = self._tokenizer
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        parts = [text]
        if backend.pre_tokenizer is not None:
            parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for part in parts for token in backend.model.tokenize(part)]

    def _control_tokens(self, is_written: Callable[[str], bool]) -> list[str]:
        return [
            token.content
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.special or (is_written(token.content) and not token.content.isspace())
        ]


def read_json_object(path: Path) -> dict[str, Any]:
    """Return what a file of a base holds, nothing if it is not there.

    Raises:
        BaseUnsupportedError: It is no JSON object.
    """
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except UNREADABLE:
        raise BaseUnsupportedError(f"{path} is not a JSON object.") from None


def _named_tokens(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[str, str]:
    found = {name: config.get(name) or legacy.get(name) for name in _NAMED_TOKENS}
    named: dict[str, str] = {}
    for name, value in found.items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[name] = text
        elif value is not None:
            raise BaseUnsupportedError(f"The base's tokenizer names its {name} by something else than text.")
    return named


def _build_tokenizer(text: str, named: Mapping[str, str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [token for token in named.values() if token not in added and backend.token_to_id(token) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in missing])
    return backend
