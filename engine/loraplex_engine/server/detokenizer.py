"""Text from token ids, one id at a time: a character is given out when its last byte is there, never in halves."""

from __future__ import annotations

import codecs
from collections.abc import Container

from loraplex_engine.token_table import TokenTable


class Detokenizer:
    """Turns one answer's ids into text.

    Args:
        table: Bytes and names of the vocabulary.
        strips_leading_space: For an answer that does not continue its prompt.
        visible: Special tokens that are text all the same, by their names.
    """

    def __init__(self, table: TokenTable, *, strips_leading_space: bool, visible: Container[int] = ()) -> None:
        self._table = table
        self._visible = visible
        self._strips = strips_leading_space and table.has_leading_space
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def get_bytes(self, token_id: int) -> bytes:
        """Return what `push` of this id would add to the answer's bytes now."""
        data = self._get(token_id)
        return data.removeprefix(b" ") if self._strips else data

    def get_name(self, token_id: int) -> str:
        """Return what the vocabulary calls a special token; nothing for others."""
        return self._table.get_name(token_id)

    def push(self, token_id: int) -> str:
        """Take one id; return the characters that it completes."""
        data = self.get_bytes(token_id)
        if self._strips and self._get(token_id):
            self._strips = False
        return self._decode(data)

    def flush(self) -> str:
        """Return one U+FFFD if the answer ended within a character, else nothing."""
        return self._decode(b"", True)  # noqa: FBT003 - positional in C

    def _get(self, token_id: int) -> bytes:
        return self._table.get_name(token_id).encode() if token_id in self._visible else self._table.get(token_id)
