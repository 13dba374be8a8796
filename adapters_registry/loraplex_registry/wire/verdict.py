"""How an engine says that it could not measure an adapter now."""

from __future__ import annotations


class NoVerdictError(Exception):
    """An engine was asked and could not measure now: away, busy for too long, or it could not load the content.

    `is_content` says that the bytes are to blame: the engines' own count of such failures decides on them.
    """

    def __init__(self, message: str, *, is_content: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.is_content = is_content
