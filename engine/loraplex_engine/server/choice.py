"""One choice of one prompt: token events in, text out, and where it ends.

`Choice` is written only by its generation's events. It knows ids, text and stop strings; not HTTP, not its siblings.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loraplex_engine.server.detokenizer import Detokenizer
from loraplex_engine.server.logprob import Entry, LogprobQueue, LogprobWriter
from loraplex_engine.server.stop import StopMatcher
from loraplex_engine.wire.messages import AddRequest, RequestStats, TokenEvent

# what a piece of text or an entry takes beside its own bytes
_PIECE_BYTES = 64


class Update(msgspec.Struct, frozen=True):
    """What is new of one choice: text, log-probabilities if they were asked for, and the reason if it ended."""

    index: int
    text: str
    finish: str | None
    entries: Sequence[Entry] = ()


class Choice:
    """One answer: `finish` is set when its text is complete, `is_closed` when the core has let go of it."""

    def __init__(
        self,
        index: int,
        request: AddRequest,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        writer: LogprobWriter | None = None,
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
        self._pending: list[str] = []
        self._entries: list[Entry] = []
        self._logprobs = None if writer is None else LogprobQueue(writer)
        # characters of the answer: read from tokens, and given out
        self._num_read = self._num_given = 0
        self._is_finish_taken = self._is_mute = False

    def feed(self, event: TokenEvent) -> bool:
        """Take one event; say whether a stop string ended the text while the core goes on."""
        if self.finish is None:
            self._read(event)
        saw_stop = self.finish is not None and event.finish is None and not self.is_closed
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
            self.finish = finish
            # the core also counts the token that ended it, which has no text
            self.num_tokens = stats.completion_tokens if stats else self.num_tokens
            if self._logprobs is not None:
                self._give(self._logprobs.flush())

    def mute(self) -> None:
        """Give out no text any more, since nobody will take it; tokens are still counted."""
        self._is_mute, self._logprobs = True, None
        self._pending, self._entries, self.pending_bytes = [], [], 0

    def take(self) -> Update | None:
        """Return what is new since the last call, or None."""
        finish = None if self._is_finish_taken else self.finish
        if not self._pending and not self._entries and finish is None:
            return None
        self._is_finish_taken = finish is not None
        text, entries = "".join(self._pending), self._entries
        self._pending, self._entries, self.pending_bytes = [], [], 0
        return Update(self.index, text, finish, entries)

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
            self.finish = "stop"

    def _append(self, text: str) -> None:
        if not text or self.finish is not None or self._is_mute:
            return
        self._pending.append(text)
        self.pending_bytes += len(text) + _PIECE_BYTES
        self._num_given += len(text)
        if self._logprobs is not None:
            self._give(self._logprobs.pop(self._num_given))

    def _give(self, entries: list[Entry]) -> None:
        self._entries += entries
        self.pending_bytes += sum(_PIECE_BYTES + sum(map(len, entry)) for entry in entries)
