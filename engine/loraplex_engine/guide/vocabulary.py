"""A base's tokens as llguidance reads them, and how much a grammar may cost."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import llguidance
import msgspec
import tokenizers

from loraplex_engine.errors import BaseUnsupportedError
from loraplex_engine.token_table import build_token_table

_log = logging.getLogger(__name__)

MAX_LEXER_STATES = 50_000
"""Memory of one request's grammar: a state is one or two kB."""
MAX_STEP_ITEMS = 4_000
"""Of the parser for one token: some 5 ms. Schemas of hundreds of properties need some hundred."""
STEP_LEXER_FUEL = 200_000
"""Of the lexer for one token: about 15 ms."""
_MAX_CHAR_BYTES = 4


def read_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer | None:
    """Read the tokens of a base.

    Args:
        folder: of the base, with a `tokenizer.json`.
        vocab_size: of the model.
        eos_token_ids: tokens that end an answer where the grammar lets it end.

    Returns:
        None if grammars cannot be followed with this base; the log says why.
    """
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        return build_vocabulary(text, vocab_size, eos_token_ids)
    except (OSError, ValueError, BaseUnsupportedError) as error:
        _log.warning("no structured output with this base: %s", error)
        return None


def build_vocabulary(text: str, vocab_size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """Build what matchers need of a tokenizer.

    A token is special if `tokenizer.json` says so, and only then: llguidance itself would count every added token that
    is written `<...>`, and models could not begin a tool call. Special tokens come where a grammar names them, padding
    of the vocabulary never.

    Args:
        text: of `tokenizer.json`.
        vocab_size: of the model.
        eos_token_ids: tokens that end an answer; without any it goes on until nothing may follow.

    Raises:
        ValueError, BaseUnsupportedError: It cannot be read.
    """
    words = _Words(text, vocab_size, eos_token_ids)
    # the types promise less than the constructor takes
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), eos_token=list(words.eos_token_ids))


def build_limits() -> llguidance.LLParserLimits:
    """Limits of one grammar; a request that passes one ends with an error."""
    return llguidance.LLParserLimits(
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=MAX_STEP_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        # errors would tell what was generated
        verbose_errors=False,
    )


class _Words:
    """The tokens by id, and how text that a grammar leaves no choice about is written in them."""

    bos_token_id = None

    def __init__(self, text: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        table = build_token_table(msgspec.json.decode(text))
        self._backend = tokenizers.Tokenizer.from_str(text)
        self._backend.no_truncation()
        self._backend.no_padding()
        # names of special tokens in a grammar's text are text
        self._backend.encode_special_tokens = True
        # a space would be put before the first word
        self._lead = "\n" if table.has_leading_space else ""
        self._lead_ids = self._encode(self._lead)
        size = max(vocab_size, self._backend.get_vocab_size(with_added_tokens=True))
        names = {token_id: table.get_name(token_id) for token_id in range(size)}
        self.tokens = [names[i].encode() if names[i] else table.get(i) for i in range(size)]
        self.special_token_ids = [token_id for token_id, name in names.items() if name]
        self._table = table
        self._piece_to_id = {
            piece: token_id for token_id in range(size) if 0 < len(piece := table.get(token_id)) <= _MAX_CHAR_BYTES
        }
        self.eos_token_ids = [token_id for token_id in eos_token_ids if token_id < size] or [self._add_end()]
        self.eos_token_id = self.eos_token_ids[0]

    def __call__(self, text: str) -> list[int]:
        ids = self._encode(self._lead + text)
        size = len(self._lead_ids)
        ids = ids[size:] if ids[:size] == self._lead_ids else self._encode(text)
        return ids if b"".join(map(self._table.get, ids)) == text.encode() else self._spell(text)

    def _add_end(self) -> int:
        """A token that the model does not have, for a base without any that ends."""
        self.tokens.append(b"<|end of answer|>")
        self.special_token_ids.append(len(self.tokens) - 1)
        return len(self.tokens) - 1

    def _spell(self, text: str) -> list[int]:
        """Write text as single characters and bytes where the tokenizer would change it."""
        ids: list[int] = []
        for char in text:
            piece = char.encode()
            if piece in self._piece_to_id:
                ids.append(self._piece_to_id[piece])
            else:
                ids += [self._piece_to_id.get(bytes([byte]), -1) for byte in piece]
        # what it has no tokens for ends the part that is forced
        return ids[: ids.index(-1)] if -1 in ids else ids

    def _encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)
