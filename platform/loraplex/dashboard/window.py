"""The time window that a page shows, as its address says it."""

from __future__ import annotations

from loraplex.errors import InvalidRequestError
from loraplex.stats.report import WINDOW_TO_SECONDS

WINDOWS = (("1m", "1 minute"), ("10m", "10 minutes"), ("1h", "1 hour"))
DEFAULT_WINDOW = "10m"


def read_window(text: str | None) -> str:
    """Return the window that is asked for.

    Raises:
        InvalidRequestError: There is no such window.
    """
    if text is None:
        return DEFAULT_WINDOW
    if text not in WINDOW_TO_SECONDS:
        raise InvalidRequestError(f"window is one of {', '.join(WINDOW_TO_SECONDS)}", param="window")
    return text
