"""What a rule found out about one subject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Figure = int | float | str | list[str] | None
State = Literal["advice", "fine", "not_enough"]
Rule = Literal["max_model_len", "max_num_seqs", "max_loras", "prefix_cache", "idle_adapters", "same_adapters", "limits"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`advice`: do this; `fine`: nothing to do; `not_enough`: too little traffic to say.

    `message` says what was found, `effect` what changes if the advice is followed, `flag` is the flag or command as it
    is to be given, empty where there is none. `evidence` has the figures by name; times in seconds, shares from 0 to 1.
    """

    rule: Rule
    subject: str
    state: State
    message: str
    effect: str = ""
    flag: str = ""
    evidence: Mapping[str, Figure] = {}


def say_too_little(rule: Rule, subject: str, num_seen: int, num_needed: int, what: str = "requests") -> Finding:
    """Return the finding of a rule that has seen too little to say anything."""
    return Finding(
        rule=rule,
        subject=subject,
        state="not_enough",
        message=f"Not enough to say: {num_seen:,} {what} seen, {num_needed:,} needed.",
        evidence={f"{what}_seen": num_seen, f"{what}_needed": num_needed},
    )


def percent(share: float) -> str:
    """A share for people."""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"
