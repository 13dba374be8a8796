"""What the clients of the chaos suite know: what they asked, what was answered, what was acknowledged to them.

`Books` is written by the clients alone. Whoever reads it decides what was wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

CUT = "cut"
"""How a request ended whose connection did."""
GONE = "gone"
"""How a request ended that its client left."""


@dataclass
class Answer:
    """One generation and its end: `ok`, the code of an error, `CUT` or `GONE`."""

    gateway: str
    model: str
    prompt: str
    began_at: float
    ended_at: float = 0.0
    told_at: float = 0.0
    """When its status was there."""
    request_id: str | None = None
    digest: str | None = None
    texts: list[str] = field(default_factory=lambda: [""])
    """Of each choice, as far as it was read."""
    num_tokens: int | None = None
    """What its usage says that all choices have."""
    end: str = CUT


@dataclass
class Change:
    """A wish that the name of a model leads to a content; `acknowledged_at` is None where nobody answered."""

    model: str
    digest: str
    began_at: float
    number: int | None = None
    revision: int | None = None
    acknowledged_at: float | None = None


@dataclass
class Act:
    """A call to the management API and how it ended, as an answer does."""

    gateway: str
    what: str
    began_at: float
    ended_at: float
    end: str


@dataclass
class Books:
    """All of it. `faults` are answers that nobody should get."""

    answers: list[Answer] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    keys: dict[str, list[str]] = field(default_factory=dict)
    """Of each tenant; the newest last."""
    key_ids: list[str] = field(default_factory=list)
    versions: dict[tuple[str, int], str] = field(default_factory=dict)
    """The digest of each acknowledged version of a model."""
    retired: dict[tuple[str, int], set[bool]] = field(default_factory=dict)
    """Whether a version is retired: both where nobody answered."""
    faults: list[str] = field(default_factory=list)

    def note_version(self, model: str, number: int, digest: str) -> None:
        """An upload was acknowledged."""
        known = self.versions.setdefault((model, number), digest)
        if known != digest:
            self.faults.append(f"{model}@{number} is {digest}, and was {known}")

    def allowed(self, model: str, since: float, until: float) -> set[str]:
        """The contents that an answer may come from that was asked at `since` and begun at `until`.

        What the last acknowledged change before it led to, and what was asked for later; a change that nobody
        acknowledged may come true at any later time.
        """
        changes = [change for change in self.changes if change.model == model]
        last = max(
            (
                index
                for index, change in enumerate(changes)
                if change.acknowledged_at is not None and change.acknowledged_at <= since
            ),
            default=0,
        )
        later = {change.digest for change in changes[last + 1 :] if change.began_at <= until}
        never = {change.digest for change in changes[:last] if change.acknowledged_at is None}
        return {changes[last].digest} | later | never

    def begin_change(self, model: str, digest: str) -> Change:
        """Note a change that is about to be asked for."""
        change = Change(model, digest, time.monotonic())
        self.changes.append(change)
        return change


def count_ends(answers: list[Answer]) -> dict[str, int]:
    """How many of some answers ended each way, the most frequent first."""
    return dict(Counter(answer.end for answer in answers).most_common())
