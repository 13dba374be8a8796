"""Quotas and what requests ask of them, as plain data. Knows no clock, no store and no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from loraplex_registry.wire.limits import RATE_LIMITS, RateLimits

Shape = Literal["minute", "lease", "day", "month"]
"""How a meter counts: in any 60 seconds, what is held now, in a day or a month of UTC."""

KIND_TO_SHAPE: dict[str, Shape] = {
    "requests_per_minute": "minute",
    "tokens_per_minute": "minute",
    "concurrent_requests": "lease",
    "tokens_per_day": "day",
    "tokens_per_month": "month",
}
assert KIND_TO_SHAPE.keys() == set(RATE_LIMITS), "each limit has a shape"


class Subject(msgspec.Struct, frozen=True):
    """Whose calls count together: all of a `tenant`, of a `key`, or of an `adapter`.

    `tenant_id` says where to look for its usage; None is everywhere.
    """

    scope: Literal["tenant", "key", "adapter"]
    id: str
    tenant_id: str | None = None


class Quota(msgspec.Struct, frozen=True):
    """The rule: at most `limit` of `kind` by `subject`."""

    subject: Subject
    kind: str
    limit: int

    @property
    def shape(self) -> Shape:
        """How it is counted."""
        return KIND_TO_SHAPE[self.kind]

    @property
    def is_of_tokens(self) -> bool:
        """Whether it counts tokens, not requests."""
        return self.kind.startswith("tokens")

    @property
    def is_of_calendar(self) -> bool:
        """Whether it is counted by days or months, for which usage is the truth."""
        return self.shape in ("day", "month")

    @property
    def name(self) -> str:
        """What its meter is called; the limit may change and is no part of it."""
        return f"{self.kind}:{self.subject.scope}:{self.subject.id}"


class Charge(msgspec.Struct, frozen=True):
    """What one request asks of one quota."""

    quota: Quota
    cost: int


class Standing(msgspec.Struct, frozen=True):
    """How a quota stands: its limit in force, what is left of it, and milliseconds until all of it is."""

    limit: int
    remaining: int
    reset_ms: int


class Stamp(msgspec.Struct, frozen=True):
    """Which count of a calendar was charged: its period, and when the count itself was begun. Zeros elsewhere."""

    period: int = 0
    begun: int = 0


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """What was reserved at once: `charges`, at the second `at_s` of the meter's clock, under the name `lease`."""

    lease: str
    charges: tuple[Charge, ...]
    at_s: int
    stamps: tuple[Stamp, ...]
    standings: tuple[Standing, ...]


class Debt(msgspec.Struct, frozen=True, kw_only=True):
    """What the period of a calendar owes to the next ones beyond its limit, and what the ones before owed to it.

    As of `at_ms` of the meter's clock. Usage says nothing of it, for it does not know what the limit was.
    """

    quota: Quota
    period: int
    carried: int
    owed: int
    at_ms: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing was reserved: `quota` has no room for longest.

    `wait_ms` is the least time after which all would have room if nobody else calls; None if the request alone is more
    than a limit.
    """

    quota: Quota
    cost: int
    wait_ms: int | None
    charges: tuple[Charge, ...]
    standings: tuple[Standing, ...]


class Unseeded(msgspec.Struct, frozen=True):
    """Nothing was reserved: what these have used is not known, at this time in milliseconds of the meter's clock."""

    quotas: tuple[Quota, ...]
    now_ms: int


class Lost(msgspec.Struct, frozen=True):
    """Nothing was reserved: the meter holds other data than those that this gateway has told of what it granted."""


Outcome = Hold | Refusal | Unseeded | Lost
"""What a meter answers."""


def list_quotas(limits: Sequence[tuple[Subject, RateLimits | None]]) -> list[Quota]:
    """Return the quotas that some subjects have."""
    return [
        Quota(subject, kind, limit)
        for subject, given in limits
        if given is not None
        for kind in KIND_TO_SHAPE
        if (limit := getattr(given, kind)) is not None
    ]


def list_charges(quotas: Sequence[Quota], num_tokens: int) -> tuple[Charge, ...]:
    """Return what a request of `num_tokens` asks of each."""
    return tuple(Charge(quota, num_tokens if quota.is_of_tokens else 1) for quota in quotas)
