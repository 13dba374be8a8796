"""What a fault of the chaos suite is: how it comes and goes, how requests may end beside it, what must hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

LONGEST_S = 20.0
"""No request may take longer, unless the fault says so; without one it takes a tenth of a second."""
BACK_S = 60.0
"""So soon everything must be as before once the fault is over, unless it says so."""


@dataclass(frozen=True)
class Fault:
    """One way to hurt a world.

    `act` hurts it when it is entered and heals it when it is left; what heals by itself it only enters. Requests beside
    it end with `ok` or one of `ends`, calls of the management API with `ok` or one of `act_ends`, and connections are
    cut only at the first gateway, and there only if `is_cut`.
    """

    name: str
    holds: str
    """What is true meanwhile, for the table; what always must hold is not repeated."""
    act: Callable[[Any], AbstractAsyncContextManager[None]]
    held_s: float = 2.0
    ends: frozenset[str] = frozenset()
    act_ends: frozenset[str] = frozenset()
    is_cut: bool = False
    longest_s: float = LONGEST_S
    back_s: float = BACK_S
    needs: str = ""
    """What of the world's `tools` it takes."""
    is_sample: bool = False
    """Also in `make test`."""

    def __str__(self) -> str:
        return self.name


COLD = frozenset({"adapter_loading"})
COLD_S = 30.0
"""The longest pause between two tries of an engine to load an adapter."""


def errors(*codes: str) -> frozenset[str]:
    """Codes of errors that are explained by a fault."""
    return frozenset(codes)
