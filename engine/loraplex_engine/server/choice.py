"""One choice of one prompt: token events in, text and tool calls out, and where it ends.

`Choice` is written only by its generation's events. It knows ids, text, stop strings and how calls are read; not HTTP,
and of its siblings only what they share of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loraplex_engine.server.detokenizer import Detokenizer
from loraplex_engine.server.echo import PromptPart
from loraplex_engine.server.logprob import Entry, LogprobQueue, LogprobWriter
from loraplex_engine.server.stop import StopMatcher
from loraplex_engine.server.tool.delta import CallDelta, Parsed, ToolReader
from loraplex_engine.wire.messages import AddRequest, RequestStats, TokenEvent

# what a piece of text or an entry takes beside its own bytes
_PIECE_BYTES = 64


class Update(msgspec.Struct, frozen=True):
    """What is new of one choice: text, log-probabilities if they were asked for, calls, the reason if it ended."""

    index: int
    text: str
    finish: str | None
    entries: Sequence[Entry] = ()
    calls: Sequence[CallDelta] = ()
    prompt: PromptPart | None = None
    """In the first update of a choice that states its prompt."""


class Choice:
    """One answer: `finish` is set when its text is complete, `is_closed` when the core has let go of it."""

    def __init__(
        self,
        index: int,
        request: AddRequest,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        *,
        writer: LogprobWriter | None = None,
        reader: ToolReader | None = None,
        prompt: PromptPart | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.finish: str | None = None
        self.stats: RequestStats | None = None
        self.num_tokens = 0
        self.is_closed = False
        self.pending_bytes = 0
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._reader = reader
        self._prompt = prompt
        self._pending: list[str] = []
        self._entries: list[Entry] = []
        self._calls: list[CallDelta] = []
        self._logprobs = None if writer is None else LogprobQueue(writer)
        # characters of the answer, behind those of an echoed prompt: read from tokens, and given out
        self._num_read = self._num_given = 0 if prompt is None else len(prompt.text or "")
        self._is_opened = self._is_finish_taken = self._is_mute = False

    def feed(self, event: TokenEvent) -> bool:
        """Take one event; say whether a stop string in it ended the text while the core goes on."""
        self._is_opened = True
        if self._prompt is not None and self.request.params.prompt_logprobs is not None and event.error is None:
            self._prompt.take(event.prompt_logprobs)
        was_open = self.finish is None
        if was_open:
            self._read(event)
        saw_stop = was_open and self.finish is not None and event.finish is None
        if event.finish is not None:
            self.close(event.finish, event.stats)
        return saw_stop

    def close(self, finish: str, stats: RequestStats | None) -> None:
        """Note that no event comes any more."""
        self.is_closed = True
        self.stats = stats
        if self.finish is not None:
            return
        self._add(self._detokenizer.flush())
        self._append(self._matcher.flush())
        if self.finish is None:
            self._end(finish)
            # the core also counts the token that ended it, which has no text
            self.num_tokens = stats.completion_tokens if stats else self.num_tokens
            if self._logprobs is not None:
                self._give(self._logprobs.flush())

    def mute(self) -> None:
        """Give out no text any more, since nobody will take it; tokens are still counted."""
        self._is_mute, self._logprobs, self._prompt = True, None, None
        self._pending, self._entries, self._calls, self.pending_bytes = [], [], [], 0

    def take(self) -> Update | None:
        """Return what is new since the last call, or None."""
        prompt = self._prompt
        if not self._is_opened or (prompt is not None and not prompt.is_ready):
            return None
        finish = None if self._is_finish_taken else self.finish
        if not self._pending and not self._entries and not self._calls and finish is None and prompt is None:
            return None
        self._is_finish_taken = finish is not None
        reader = self._reader
        if finish == "stop" and reader is not None and reader.num_calls and not reader.has_broken_call:
            finish = "tool_calls"
        text, entries, calls = "".join(self._pending), self._entries, merge(self._calls)
        self._pending, self._entries, self._calls, self._prompt, self.pending_bytes = [], [], [], None, 0
        return Update(self.index, text, finish, entries, calls, prompt)

    @property
    def is_complete(self) -> bool:
        """Whether the text came to its own end."""
        return self.finish in ("stop", "length")

    def _read(self, event: TokenEvent) -> None:
        for position, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            if self._logprobs is not None:
                self._logprobs.push(token_id, event.logprobs[position], self._num_read, self._detokenizer)
            self._add(self._detokenizer.push(token_id))
            if self.finish is not None:
                # tokens behind the one that completed a stop string are nobody's
                return

    def _add(self, text: str) -> None:
        self._num_read += len(text)
        if self.num_tokens < self.request.params.min_tokens:
            self._append(text)
            return
        safe, is_stop = self._matcher.push(text)
        self._append(safe)
        if is_stop:
            self._end("stop")

    def _end(self, finish: str) -> None:
        """Note that the text is complete."""
        if self._reader is not None:
            self._put(self._reader.flush())
        self.finish = finish

    def _append(self, text: str) -> None:
        if not text or self.finish is not None or self._is_mute:
            return
        self._num_given += len(text)
        self._put(Parsed(text) if self._reader is None else self._reader.push(text))
        if self._logprobs is not None:
            self._give(self._logprobs.pop(self._num_given))

    def _put(self, parsed: Parsed) -> None:
        if self._is_mute:
            return
        if parsed.text:
            self._pending.append(parsed.text)
            self.pending_bytes += len(parsed.text) + _PIECE_BYTES
        self._calls += parsed.calls
        self.pending_bytes += sum(_PIECE_BYTES + len(call.arguments) for call in parsed.calls)

    def _give(self, entries: list[Entry]) -> None:
        self._entries += entries
        self.pending_bytes += sum(_PIECE_BYTES + sum(map(len, entry)) for entry in entries)


def merge(calls: Sequence[CallDelta]) -> list[CallDelta]:
    """Return pieces of calls, those of one call as one where they come in a row."""
    merged: list[CallDelta] = []
    for call in calls:
        last = merged[-1] if merged else None
        if last is not None and last.index == call.index:
            merged[-1] = CallDelta(
                last.index, last.arguments + call.arguments, last.id or call.id, last.name or call.name
            )
        else:
            merged.append(call)
    return merged
