"""Pieces of statistics that come back from the database damaged, or from another release."""

from __future__ import annotations

import zlib

import pytest

from loraplex.stats.piece import Piece, decode_piece, encode_piece

WHOLE = encode_piece(Piece([], b"", [], []))


def test_what_is_written_is_read() -> None:
    assert decode_piece(WHOLE) == Piece([], b"", [], [])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" + WHOLE[1:],
        WHOLE[:1],
        WHOLE[:-6],
        WHOLE[:1] + zlib.compress(b"\x91" * 100_000),
        WHOLE[:1] + zlib.compress(b"\xc1"),
    ],
    ids=["empty", "other", "head", "cut", "nested", "bytes"],
)
def test_what_rotted_is_no_piece(content: bytes) -> None:
    assert decode_piece(content) is None
