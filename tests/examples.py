"""How many examples a property test tries that is dear: `@settings(max_examples=examples(5))`."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """So many in `make test`, twenty times as many in `make endure`."""
    return count * (20 if settings.get_current_profile_name() == "endure" else 1)
