"""JSON checked one character at a time, so that what is passed on is at every moment the beginning of valid JSON.

Each function is a generator that is sent the characters of a value behind its first and stops with the value; one that
cannot know its end without the next character (a number) returns that character.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

MAX_DEPTH = 64
WHITESPACE = " \t\r\n"
_DIGITS = "0123456789"
_HEX = _DIGITS + "abcdefABCDEF"
_REST_OF_LITERAL = {"t": "rue", "f": "alse", "n": "ull"}

_Result = TypeVar("_Result")
Scan = Generator[None, str, _Result]


class BrokenTextError(Exception):
    """The text is not what it began as; the last character sent does not belong to it."""


def skip(char: str | None = None) -> Scan[str]:
    """Return the next character that is not white space, `char` if it is none."""
    if char is None:
        char = yield
    while char in WHITESPACE:
        char = yield
    return char


def expect(text: str) -> Scan[None]:
    """Take exactly these characters."""
    for expected in text:
        if (yield) != expected:
            raise BrokenTextError


def scan_value(char: str, depth: int = 0) -> Scan[str | None]:
    """Take the value that begins with `char`."""
    if char == '"':
        yield from scan_string()
    elif char == "{":
        yield from _scan_object(depth + 1)
    elif char == "[":
        yield from _scan_array(depth + 1)
    elif char in _REST_OF_LITERAL:
        yield from expect(_REST_OF_LITERAL[char])
    else:
        return (yield from _scan_number(char))
    return None


def scan_string() -> Scan[None]:
    """Take a string behind its opening quote."""
    while (char := (yield)) != '"':
        if char < " ":
            raise BrokenTextError
        if char == "\\":
            yield from _scan_escape()


def _scan_escape() -> Scan[None]:
    char = yield
    if char == "u":
        for _ in range(4):
            if (yield) not in _HEX:
                raise BrokenTextError
    elif char not in '"\\/bfnrt':
        raise BrokenTextError


def _scan_object(depth: int) -> Scan[None]:
    char = yield from skip()
    if char == "}":
        return
    while True:
        if char != '"':
            raise BrokenTextError
        yield from scan_string()
        if (yield from skip()) != ":":
            raise BrokenTextError
        if (yield from _scan_element((yield from skip()), depth, "}")) == "}":
            return
        char = yield from skip()


def _scan_array(depth: int) -> Scan[None]:
    char = yield from skip()
    if char == "]":
        return
    while (yield from _scan_element(char, depth, "]")) != "]":
        char = yield from skip()


def _scan_element(char: str, depth: int, end: str) -> Scan[str]:
    """Take a value inside a container and return what follows it: a comma or the container's end."""
    if depth > MAX_DEPTH:
        raise BrokenTextError
    following = yield from skip((yield from scan_value(char, depth)))
    if following not in ("," + end):
        raise BrokenTextError
    return following


def _scan_number(char: str) -> Scan[str]:
    if char == "-":
        char = yield
    char = (yield) if char == "0" else (yield from _scan_digits(char))
    if char == ".":
        char = yield from _scan_digits((yield))
    if char in "eE":
        char = yield
        char = yield from _scan_digits((yield) if char in "+-" else char)
    return char


def _scan_digits(char: str) -> Scan[str]:
    if char not in _DIGITS:
        raise BrokenTextError
    while char in _DIGITS:
        char = yield
    return char
