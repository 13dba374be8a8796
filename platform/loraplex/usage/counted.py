"""What is charged of requests, as engines count it and as rows say it. Pure, but for columns of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa

from loraplex.db.tables import usage

NAMES = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "load_bytes")


class Counted(msgspec.Struct, frozen=True):
    """Requests that are charged, their tokens and bytes, counted by somebody."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    load_bytes: int = 0

    def minus(self, other: Counted) -> Counted:
        """Return what is left without another count."""
        return Counted(*(getattr(self, name) - getattr(other, name) for name in NAMES))


def add(counts: Iterable[Counted]) -> Counted:
    """Return the sum; of some or of none."""
    every = list(counts)
    return Counted(*(sum(getattr(counted, name) for counted in every) for name in NAMES))


def count_row(row: Mapping[str, Any]) -> Counted:
    """Return what a row of `select_rows`, or of `select_sums`, counts."""
    return Counted(*(int(row[name]) for name in NAMES))


def select_rows(*more: sa.ColumnElement[Any]) -> sa.Select[Any]:
    """Ask for usage rows, one by one, with further columns."""
    return sa.select(
        usage.c.request_id,
        usage.c.outcome,
        *more,
        *(usage.c[name] for name in NAMES[1:]),
        sa.case((_is_charged(), 1), else_=0).label("requests"),
    )


def select_sums(before: datetime) -> sa.Select[Any]:
    """Ask for the sums of usage rows that were settled before an instant.

    Also for how many of these were `lost`, and how many rows were settled since (`later`).
    """
    is_old = usage.c.settled_at < before
    return sa.select(
        sa.func.count(sa.case((is_old & _is_charged(), 1))).label("requests"),
        *(sa.func.coalesce(sa.func.sum(sa.case((is_old, usage.c[name]))), 0).label(name) for name in NAMES[1:]),
        sa.func.count(sa.case((is_old & (usage.c.outcome == "lost"), 1))).label("lost"),
        sa.func.count(sa.case((~is_old, 1))).label("later"),
    )


def _is_charged() -> sa.ColumnElement[bool]:
    """As `RequestDone.is_charged`: what an engine refused, or never got, may have been answered by another one."""
    return sa.or_(usage.c.finish.in_(("stop", "length")), usage.c.completion_tokens > 0)
