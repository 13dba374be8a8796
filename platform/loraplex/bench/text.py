"""Prompts of so many tokens, made of words.

With a tokenizer's file each word is one token of it. Without, they are common English words, and what the server counts
for two prompts says how many tokens a word has and how many its template adds.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loraplex.bench.errors import BenchError
from loraplex_registry.peft.unreadable import UNREADABLE

_MARKS = ("Ġ", "▁")
"""How vocabularies write the space before a word."""
_SHORTEST, _LONGEST = 3, 8
_COMMON = """
able above after again age air all also always animal answer any area arm around ask away back ball bank base
bed been before began begin behind best better big bird black blue board boat body book both box boy bring
brother brought brown build built business call came can car care carry catch center change check child church
circle city class clean clear close cloud cold color come common complete corn correct could country course
cover cross cry current cut dark day deep develop differ direct distance dog door down draw drive dry during
each early earth east easy eat end energy engine enough even ever every example eye face fact fall family far
farm fast father feel few field figure fill final find fine fire first fish five floor flow fly follow food foot
force form four free friend from front full game gave general give glass gold good great green ground group grow
had half hand happen hard have head hear heart heat heavy help here high hill history hold home horse hot hour
house hundred idea inch island job keep kind king know lady lake land language large last late laugh lead learn
leave left less letter life light line list listen little live long look love low machine made main make man
many map mark matter mean measure men might mile mind minute miss money month moon more morning most mother
mountain move much music must name near need never new next night north note notice number object ocean often
oil old once one only open order other over own page paint paper part pass pattern people person picture piece
place plain plan plane plant play point port power press problem produce product pull put question quick rain
ran reach read ready real record red rest right river road rock room round rule run said same saw school science
sea second see seem sentence serve set several shape ship short should show side simple since sing size sleep
slow small snow some song soon sound south special spell stand star start state stay step still stop story
street strong study such summer sun sure surface system table take talk teach tell test than thing think third
thought thousand three through time together told too took top toward town travel tree true try turn two under
unit until use usual very voice voyage walk wall want war warm watch water way week weight well went west wheel
while white whole wind winter wish wonder wood word work world would write year young
"""


@dataclass(frozen=True)
class Text:
    """Words, and what they weigh: `tokens_per_word` each, and `overhead` for the prompt around them."""

    words: tuple[str, ...] = tuple(_COMMON.split())
    tokens_per_word: float = 1.0
    overhead: float = 0.0
    is_exact: bool = False
    """Whether each word is known to be one token."""

    def make(self, num_tokens: int, rng: random.Random) -> str:
        """Return a text of about so many tokens, without what the template adds."""
        num_words = max(1, round(num_tokens / self.tokens_per_word))
        return "".join(f" {word}" for word in rng.choices(self.words, k=num_words))

    def fit(self, num_short: int, short_tokens: int, num_long: int, long_tokens: int) -> Text:
        """Return these words weighed by what a server counted for two prompts of so many of them."""
        per_word = (long_tokens - short_tokens) / (num_long - num_short)
        if per_word <= 0:
            raise BenchError(
                f"The server counts {short_tokens} prompt tokens for {num_short} words and {long_tokens} for "
                f"{num_long}: its usage cannot be right."
            )
        return Text(self.words, per_word, max(0.0, short_tokens - per_word * num_short))


def read_vocabulary(path: Path) -> Text:
    """Return the words that are one token each in a `tokenizer.json`, or in the one of a folder.

    Raises:
        BenchError: There is no such file, or it has no such word.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        found = msgspec.json.decode(file.read_bytes())
        pieces = _list_pieces(found["model"]["vocab"])
    except (OSError, *UNREADABLE, KeyError, TypeError) as error:
        raise BenchError(f"{file} is no tokenizer.json: {error}", param="tokenizer") from error
    words = {piece[1:] for piece in pieces if piece.startswith(_MARKS)}
    usable = sorted(word for word in words if _SHORTEST <= len(word) <= _LONGEST and word.isascii() and word.isalpha())
    if not usable:
        raise BenchError(f"{file} has no whole word to write prompts of; leave --tokenizer out.", param="tokenizer")
    return Text(tuple(usable), is_exact=True)


def _list_pieces(vocabulary: Any) -> Iterable[str]:
    """Byte pairs are an object, unigrams a list of piece and score."""
    return vocabulary if isinstance(vocabulary, dict) else (piece for piece, _ in vocabulary)
