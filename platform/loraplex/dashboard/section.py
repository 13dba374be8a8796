"""What a module of pages is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loraplex.dashboard.board import Board
from loraplex.dashboard.live import Streams
from loraplex.dashboard.lookout import Lookout
from loraplex.dashboard.menu import Entry
from loraplex.dashboard.page import Pages
from loraplex.dashboard.parts import Parts


@dataclass(frozen=True, kw_only=True)
class Desk:
    """What routes work with."""

    parts: Parts
    pages: Pages
    streams: Streams
    board: Board
    lookout: Lookout


@dataclass(frozen=True, kw_only=True)
class Section:
    """Some pages: their entries in the menu, and their route handlers."""

    entries: Sequence[Entry] = field(default=())
    handlers: Sequence[Any]
