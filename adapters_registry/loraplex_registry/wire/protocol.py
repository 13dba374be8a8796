"""The language between gateway, registry and engines as a number, so that releases N and N+1 know whether they agree.

A part that adds a field raises nothing: readers pass over what they do not know, and what is new has a default. A part
that changes what a field means, or needs a new one, raises `NEWEST`, and `OLDEST` one release later.
"""

from __future__ import annotations

NEWEST = 1
"""What this program speaks best."""

OLDEST = 1
"""The oldest that it still speaks."""

HEADER = "x-loraplex-protocol"
"""Of answers between parts: `OLDEST-NEWEST`."""

SPOKEN = f"{OLDEST}-{NEWEST}"


def find_mismatch(who: str, spoken: object) -> str | None:
    """Return why this program cannot talk to another part, None if it can.

    Args:
        who: The other part, for the message.
        spoken: What it says that it speaks, as `SPOKEN`; a part that says nothing is older than numbers, and speaks 1.
    """
    oldest, newest = _read(spoken)
    if oldest <= NEWEST and newest >= OLDEST:
        return None
    older = who if newest < OLDEST else "this program"
    return f"{who} speaks protocol {oldest}-{newest} and this program {SPOKEN}; upgrade {older}"


def _read(spoken: object) -> tuple[int, int]:
    first, _, last = spoken.partition("-") if isinstance(spoken, str) else ("1", "", "1")
    if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit() and len(first + last) < 9):
        return 1, 1
    return int(first), int(last)
