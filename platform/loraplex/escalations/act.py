"""What people ask for: to open an escalation, to approve it, to register its full fine-tune. Plain data."""

from __future__ import annotations

from datetime import datetime

import msgspec

from loraplex.escalations.evidence import Evidence
from loraplex.escalations.machine import OnOverdue


class EscalationOpening(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for: an adapter, which of its versions falls short (None: the live one), and the evidence."""

    adapter: str
    version: int | None
    evidence: Evidence
    reason: str | None
    expires_at: datetime | None


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """What an administrator agrees to."""

    owner: str
    justification: str
    budget_per_month: float
    currency: str | None
    review_at: datetime
    on_overdue: OnOverdue


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The full fine-tune; without a cost of its own it costs what was approved."""

    pool: str
    digest: str
    cost_per_month: float | None
