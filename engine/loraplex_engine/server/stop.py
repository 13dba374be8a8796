"""Stop strings over text that arrives in pieces: what may be sent now, what must wait, and where the text ends.

`StopMatcher` holds back exactly the longest tail that could still become a stop string. The result does not depend on
how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


def build_failures(pattern: str) -> list[int]:
    """Return Knuth, Morris and Pratt's table: for each prefix, the length of its longest border."""
    failures = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = failures[length - 1]
        length += pattern[index] == pattern[length]
        failures[index] = length
    return failures


class _Pattern:
    """One stop string and how much of it the text's tail matches."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._failures = build_failures(pattern)

    def advance(self, char: str) -> bool:
        """Take one character; say whether it completed the pattern."""
        while self.matched and char != self.pattern[self.matched]:
            self.matched = self._failures[self.matched - 1]
        self.matched += char == self.pattern[self.matched]
        return self.matched == len(self.pattern)


class StopMatcher:
    """Finds the stop string that is completed first (the longest of those completed together)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text.

        Returns:
            The text that can no longer be part of a stop string, and whether one was completed: then the text before
            it is the end of the answer, and nothing may be pushed any more.
        """
        if not self._patterns:
            return text, False
        text, start = self._held + text, len(self._held)
        for end in range(start, len(text)):
            completed = [item for item in self._patterns if item.advance(text[end])]
            if completed:
                return text[: end + 1 - max(len(item.pattern) for item in completed)], True
        cut = len(text) - max(item.matched for item in self._patterns)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Return what was held back, since no more text comes."""
        held, self._held = self._held, ""
        return held
