"""Splits an answer's text, as it arrives, into content and tool calls; the result does not depend on the pieces.

Text that is no call of a tool on offer is content, unchanged. White space around calls is the form's, not the answer's:
before a call it is dropped, behind one it stays only if content follows.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable

from loraplex_engine.server.tool.call_text import read_calls
from loraplex_engine.server.tool.delta import CallDelta, Parsed
from loraplex_engine.server.tool.format import ToolFormat
from loraplex_engine.server.tool.json_scan import WHITESPACE, BrokenTextError, Scan

_ID_ALPHABET = string.ascii_letters + string.digits
_ID_CHARS = 24
# longer runs are content even before a call
_MAX_HELD_SPACE = 1024


class CallReader:
    """The `ToolReader` of one choice; also the sink of the calls that it meets.

    Under a grammar an opener surely begins a call (`is_certain`), or there is nothing but calls (`is_only_calls`): then
    what an answer that was cut off has of its last call is not content. Where the answer may be JSON instead
    (`has_answer`), it is calls from its start or content as a whole: JSON text may hold an opener.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Iterable[str],
        *,
        is_certain: bool = False,
        is_only_calls: bool = False,
        has_answer: bool = False,
    ) -> None:
        self.names = frozenset(names)
        self.num_calls = 0
        self._form = form
        self._is_certain, self._is_only_calls = is_certain or is_only_calls, is_only_calls
        self._has_answer, self._is_sure = has_answer, False
        # where calls need no opener JSON may look like one
        self._is_certain &= not (has_answer and form.is_opener_optional)
        self._scan: Scan[None] | None = None
        # text not given out: before an opener, and of calls that may yet be none
        self._pending = ""
        self._raw: list[str] = []
        self._is_start, self._is_behind_call, self._has_begun = True, False, False
        self._was_broken = self._is_unfinished = False
        self._text: list[str] = []
        self._calls: list[CallDelta] = []
        self._arguments: list[str] = []

    @property
    def has_broken_call(self) -> bool:
        """Whether the arguments of a call that has begun have not come to their end."""
        return self._was_broken or self._is_unfinished

    def push(self, text: str, /) -> Parsed:
        """Take more text; return what it settles. What may yet become a call is held back."""
        while text:
            text = self._read_plain(text) if self._scan is None else self._read_call(text)
        return self._take()

    def flush(self) -> Parsed:
        """Return what was held back, since no more text comes."""
        if self._scan is None:
            is_end_of_call = self._is_behind_call and not self._pending.strip(WHITESPACE)
            self._give("" if is_end_of_call or self._is_only_calls else self._pending)
        elif not self._has_begun and not self._is_sure:
            self._give("".join(self._raw))
        self._pending, self._raw, self._scan = "", [], None
        return self._take()

    def begin(self, name: str, /) -> None:
        """Begin a call."""
        self._end_delta()
        self._calls.append(CallDelta(index=self.num_calls, id=_make_id(), name=name))
        self.num_calls += 1
        self._has_begun = True
        self._was_broken, self._is_unfinished = self.has_broken_call, True
        self._raw = []

    def add(self, arguments: str, /) -> None:
        """Add to the arguments of the call that began last."""
        self._arguments.append(arguments)
        self._raw = []

    def end(self) -> None:
        """Note that the arguments are complete; what was read so far belongs to the call."""
        self._is_unfinished = False
        self._raw = []

    def _read_plain(self, text: str) -> str:
        """Give out what precedes a call; return the text behind the call's opener."""
        text, self._pending = self._pending + text, ""
        if self._has_answer and not self._is_start:
            self._give(text)
            return ""
        start = len(text) - len(text.lstrip(WHITESPACE))
        if self._form.is_opener_optional and self._is_start and start < len(text) and text[start] in "{[":
            return self._open(text, start, start)
        begin = text.find(self._form.opener)
        if begin == start or (begin >= 0 and not self._has_answer):
            return self._open(text, begin, begin + len(self._form.opener))
        cut = _split_space(text, len(text) - _tail_length(text, self._form.opener))
        self._give(text[:cut])
        self._pending = text[cut:]
        return ""

    def _open(self, text: str, begin: int, end: int) -> str:
        cut = _split_space(text, begin)
        self._give(text[:cut])
        self._raw, self._has_begun = [text[cut:end]], False
        # no grammar writes an opener that calls do not need: it is text
        self._is_sure = self._is_certain and not (self._form.is_opener_optional and end > begin)
        self._scan = read_calls(self, self._form)
        next(self._scan)
        return text[end:]

    def _read_call(self, text: str) -> str:
        assert self._scan is not None
        for position, char in enumerate(text):
            self._raw.append(char)
            try:
                self._scan.send(char)
            except StopIteration:
                self._raw = []
                return self._close(text[position + 1 :])
            except BrokenTextError:
                rest = self._release() + text[position + 1 :]
                return self._close(rest)
        return ""

    def _release(self) -> str:
        """Give up a call; return the text that must be read again."""
        if self._has_begun:
            return "".join(self._raw)
        *given, last = self._raw
        self._give("".join(given))
        return last

    def _close(self, rest: str) -> str:
        self._scan, self._raw = None, []
        self._is_behind_call = self._is_behind_call or self._has_begun
        return rest

    def _give(self, content: str) -> None:
        if content:
            self._text.append(content)
            self._is_start = self._is_behind_call = False

    def _end_delta(self) -> None:
        if not self._arguments:
            return
        arguments, self._arguments = "".join(self._arguments), []
        if self._calls and self._calls[-1].index == self.num_calls - 1:
            last = self._calls.pop()
            self._calls.append(CallDelta(last.index, arguments, last.id, last.name))
        else:
            self._calls.append(CallDelta(self.num_calls - 1, arguments))

    def _take(self) -> Parsed:
        self._end_delta()
        text, calls = "".join(self._text), tuple(self._calls)
        self._text, self._calls = [], []
        return Parsed(text, calls)


def _make_id() -> str:
    return "call_" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_CHARS))


def _tail_length(text: str, opener: str) -> int:
    """Return the length of the longest end of `text` that an opener could begin with."""
    longest = min(len(opener) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(opener[:size])), 0)


def _split_space(text: str, end: int) -> int:
    """Return where the white space before `end` begins."""
    return max(len(text[:end].rstrip(WHITESPACE)), end - _MAX_HELD_SPACE)
