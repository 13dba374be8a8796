"""What a command's help ends with: calls that can be copied."""

from __future__ import annotations


def examples(*calls: str) -> str:
    """Return calls as the last lines of a help text."""
    title = "Example" if len(calls) == 1 else "Examples"
    return f"{title}:\n\n" + "".join(f"  {call}\n" for call in calls)
