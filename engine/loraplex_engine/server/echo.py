"""What an answer says of its prompt: the text itself (`echo`) and its tokens' log-probabilities.

`PromptPart` belongs to one prompt and is shared by its choices; the events of the first of them bring the scores, and
nothing of the others is given out before. `render_part` turns it into JSON with pauses, since prompts are long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from loraplex_engine.server.detokenizer import Detokenizer
from loraplex_engine.server.logprob import Entry, LogprobWriter, write_prompt_position
from loraplex_engine.server.tokenizer import Tokenizer
from loraplex_engine.token_table import TokenTable
from loraplex_engine.wire.messages import NO_SCORES, PromptScores, TokenLogprobs

# positions between two pauses, and in one event of a stream
SLICE = 128


class PromptPart:
    """One prompt as its answers state it."""

    def __init__(
        self,
        ids: list[int],
        text: str | None,
        starts: Sequence[int],
        *,
        is_text: bool = False,
        has_scores: bool = False,
    ) -> None:
        """Make one.

        Args:
            ids: The prompt's tokens.
            text: What is echoed; None if nothing is.
            starts: Where each token begins in `text`.
            is_text: Whether the client sent the text, not ids.
            has_scores: Whether the core is asked for log-probabilities.
        """
        self.ids = ids
        self.text = text
        self.starts = starts
        self.scores = NO_SCORES
        self.is_ready = not has_scores
        self._is_text = is_text

    def take(self, scores: PromptScores) -> None:
        """Note the scores of all tokens but the first; only the first call counts."""
        if not self.is_ready:
            self.scores, self.is_ready = scores, True

    def build_detokenizer(self, table: TokenTable) -> Detokenizer:
        """Return the state in which an answer to this prompt begins, if the prompt is echoed."""
        if self._is_text:
            return Detokenizer(table, strips_leading_space=False)
        detokenizer = Detokenizer(table, strips_leading_space=True)
        for token_id in self.ids:
            detokenizer.push(token_id)
        return detokenizer


class RenderedPart(NamedTuple):
    """What an answer states: echoed text with entries as the answer's own, and the value of `prompt_logprobs`."""

    text: str
    starts: Sequence[int]
    entries: Sequence[Entry]
    listing: msgspec.Raw | None


class PartOptions(msgspec.Struct, frozen=True):
    """How many of the likeliest tokens each form states; None: that form is not asked for."""

    echoed: int | None = None
    listed: int | None = None

    @property
    def most(self) -> int | None:
        """What the core is asked for."""
        return max((count for count in (self.echoed, self.listed) if count is not None), default=None)


def build_parts(prompts: Sequence[list[int]], options: PartOptions) -> Sequence[PromptPart]:
    """Return the parts of prompts that are not echoed: none, unless their log-probabilities are listed."""
    if options.most is None:
        return ()
    return [PromptPart(ids, None, (), has_scores=True) for ids in prompts]


def read_echo(tokenizer: Tokenizer, prompt: str | None, ids: list[int], *, has_scores: bool) -> PromptPart:
    """Return the part of an echoed prompt: the text as it was sent, or the ids' own text."""
    if prompt is not None:
        starts = tokenizer.find_starts(prompt) if has_scores else ()
        return PromptPart(ids, prompt, starts, is_text=True, has_scores=has_scores)
    detokenizer = Detokenizer(tokenizer.table, strips_leading_space=True)
    pieces, starts, size = [], [], 0
    for token_id in ids:
        starts.append(size)
        pieces.append(detokenizer.push(token_id))
        size += len(pieces[-1])
    return PromptPart(ids, "".join(pieces), starts, has_scores=has_scores)


async def render_part(
    part: PromptPart, table: TokenTable, options: PartOptions, writer: LogprobWriter | None
) -> RenderedPart:
    """Return a part's JSON; lets others run every `SLICE` positions."""
    names = Detokenizer(table, strips_leading_space=True)
    entries: list[Entry] = []
    listed: list[bytes] = []
    for index, token_id in enumerate(part.ids if part.scores or options.most is not None else ()):
        scores = part.scores[index - 1] if index else None
        if options.echoed is not None and writer is not None:
            entries.append(writer.write(token_id, _cut(scores, options.echoed), part.starts[index], names))
        if options.listed is not None:
            listed.append(write_prompt_position(token_id, _cut(scores, options.listed), names))
        names.push(token_id)
        if index % SLICE == SLICE - 1:
            await asyncio.sleep(0)
    listing = None if options.listed is None else msgspec.Raw(b"[%b]" % b",".join(listed))
    return RenderedPart(part.text or "", part.starts, entries, listing)


def _cut(scores: TokenLogprobs | None, num_top: int) -> TokenLogprobs | None:
    return None if scores is None else TokenLogprobs(scores.logprob, scores.top[:num_top])
