"""The text of calls behind their opener, read one character at a time; what it says goes to a `CallSink`.

A call begins when its name is known to be on offer and its arguments have begun; from then on the arguments are passed
on as they come. Everything before that may turn out to be no call.
"""

from __future__ import annotations

import string
from typing import Protocol

from loraplex_engine.server.tool.format import ToolFormat
from loraplex_engine.server.tool.json_scan import BrokenTextError, Scan, expect, scan_value, skip

MAX_NAME_CHARS = 64
_NAME_CHARS = string.ascii_letters + string.digits + "_-"
# of arguments that stand before the name
_MAX_HELD_CHARS = 1 << 16
_ARGUMENTS_KEYS = ("arguments", "parameters")
# what some families write beside name and arguments; it says nothing new
_IDLE_KEYS = ("type", "id")


class CallSink(Protocol):
    """Takes calls."""

    names: frozenset[str]

    def begin(self, name: str, /) -> None:
        """Begin a call."""

    def add(self, arguments: str, /) -> None:
        """Add to the arguments of the call that began last."""

    def end(self) -> None:
        """Note that the arguments are complete; what was read so far belongs to the call."""


def read_calls(sink: CallSink, form: ToolFormat) -> Scan[None]:
    """Read all calls up to the closer.

    Raises:
        BrokenTextError: The last character sent belongs to no call.
    """
    char = yield from skip()
    if char == "[":
        yield from _read_list(sink)
    elif char == "{":
        yield from _Object(sink).read()
    else:
        yield from _read_named(sink, char)
    if form.closer:
        yield from _read_end(form)
    elif form.is_opener_optional:
        yield from _read_more(sink)


def _read_list(sink: CallSink) -> Scan[None]:
    char = yield from skip()
    while char == "{":
        yield from _Object(sink).read()
        char = yield from skip()
        if char == "]":
            return
        if char == ",":
            char = yield from skip()
    raise BrokenTextError


def _read_more(sink: CallSink) -> Scan[None]:
    """Read further objects, which a semicolon or nothing sets apart."""
    while True:
        char = yield from skip()
        if char == ";":
            char = yield from skip()
        if char != "{":
            raise BrokenTextError
        yield from _Object(sink).read()


def _read_end(form: ToolFormat) -> Scan[None]:
    if (yield from skip()) != form.closer[0]:
        raise BrokenTextError
    yield from expect(form.closer[1:])


def _read_named(sink: CallSink, char: str) -> Scan[None]:
    """Read `name[ARGS]{...}`, with `[CALL_ID]id` between or without any mark."""
    name = ""
    while char not in "[{":
        if char not in _NAME_CHARS or len(name) == MAX_NAME_CHARS:
            raise BrokenTextError
        name += char
        char = yield
    _check_name(sink, name)
    while char == "[":
        while char != "]":
            char = yield
        while char not in "[{":
            char = yield
    yield from _pass_arguments(sink, name)


class _Object:
    """One call as a JSON object; its keys may come in any order."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._name: str | None = None
        self._held: str | None = None
        self._has_begun = False

    def read(self) -> Scan[None]:
        """Read it behind its opening brace."""
        char = yield from skip()
        while char != "}":
            key = yield from _read_short_string(char)
            if (yield from skip()) != ":":
                raise BrokenTextError
            char = yield from skip((yield from self._read_field(key)))
            if char == ",":
                char = yield from skip()
            elif char != "}":
                raise BrokenTextError
        if self._name is None:
            raise BrokenTextError
        if not self._has_begun:
            self._sink.begin(self._name)
            self._sink.add(self._held or "{}")
        self._sink.end()

    def _read_field(self, key: str) -> Scan[str | None]:
        char = yield from skip()
        if key == "name" and self._name is None:
            self._name = yield from _read_short_string(char)
            _check_name(self._sink, self._name)
        elif key in _ARGUMENTS_KEYS and self._held is None and not self._has_begun:
            if char == "{" and self._name is not None:
                self._has_begun = True
                yield from _pass_arguments(self._sink, self._name)
            else:
                self._held = yield from _hold_arguments(char)
        elif key in _IDLE_KEYS:
            return (yield from scan_value(char))
        else:
            raise BrokenTextError
        return None


def _check_name(sink: CallSink, name: str) -> None:
    if name not in sink.names:
        raise BrokenTextError


def _read_short_string(char: str) -> Scan[str]:
    if char != '"':
        raise BrokenTextError
    text = ""
    while (char := (yield)) != '"':
        text += char
        if len(text) > MAX_NAME_CHARS:
            raise BrokenTextError
    return text


def _pass_arguments(sink: CallSink, name: str) -> Scan[None]:
    """Pass on an object behind its opening brace, each character once it is known to belong to it."""
    scan = scan_value("{")
    next(scan)
    sink.begin(name)
    sink.add("{")
    is_open = True
    while is_open:
        char = yield
        is_open = _send(scan, char)
        sink.add(char)
    sink.end()


def _hold_arguments(char: str) -> Scan[str]:
    """Return an object that stands before the name, as text; null counts as an empty one."""
    if char == "n":
        yield from expect("ull")
        return "{}"
    if char != "{":
        raise BrokenTextError
    scan, text, is_open = scan_value(char), [char], True
    next(scan)
    while is_open:
        char = yield
        is_open = _send(scan, char)
        text.append(char)
        if len(text) > _MAX_HELD_CHARS:
            raise BrokenTextError
    return "".join(text)


def _send(scan: Scan[str | None], char: str) -> bool:
    """Send a character on; say whether the value is still open."""
    try:
        scan.send(char)
    except StopIteration:
        return False
    return True
