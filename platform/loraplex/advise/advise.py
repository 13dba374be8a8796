"""`give_advice`: all rules over the facts, what to do first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from loraplex.advise.adapter import judge_idle, judge_same
from loraplex.advise.fact import Facts
from loraplex.advise.finding import Finding
from loraplex.advise.length import judge_lengths
from loraplex.advise.limit import judge_limits
from loraplex.advise.prefix import judge_prefixes
from loraplex.advise.seat import judge_seats
from loraplex.advise.slot import judge_slots

_OF_PLATFORM: tuple[Callable[[Facts], Iterator[Finding]], ...] = (judge_lengths, judge_seats, judge_slots)
_OF_ALL: tuple[Callable[[Facts], Iterator[Finding]], ...] = (judge_prefixes, judge_idle, judge_same, judge_limits)
_ORDER = ("advice", "fine", "not_enough")


def give_advice(facts: Facts) -> list[Finding]:
    """Return what every rule found, advice first; a tenant who asks hears of nothing but its own."""
    rules = _OF_ALL if facts.tenant_id is not None else (*_OF_PLATFORM, *_OF_ALL)
    found = [finding for rule in rules for finding in rule(facts)]
    return sorted(found, key=lambda finding: _ORDER.index(finding.state))
