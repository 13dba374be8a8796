"""How far this gateway trusts each replica, by how its requests went there. Only `Health` writes it.

    TRUSTED -broken, or failed too often-> EJECTED -time is up-> ON TRIAL -a good answer-> TRUSTED
                                                                 ON TRIAL -anything bad-> EJECTED, for twice as long

A replica that breaks a connection or takes none is out at once: whoever fails fast looks idle, and would get every
request. One that answers with errors of its own is out when three in a row, or half of what it had lately, went so. On
trial it gets one request at a time. Whether it says that it serves is judged elsewhere, from its state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

FIRST_EJECTION_S = 1.0
LONGEST_EJECTION_S = 30.0
MAX_IN_A_ROW = 3
MAX_FAILED_SHARE = 0.5
MIN_TO_JUDGE = 6.0
"""Answers, lately, below which a share means nothing."""
HALF_LIFE_S = 15.0
TRIAL_S = 30.0
"""How long a trial may stay without an answer before there is another: its client may have gone."""
_CALM_S = 60.0
FAULT_CODES = frozenset({"replica_failed", "internal_error"})
"""What an engine says that is its own fault, not the request's or the adapter's."""


@dataclass(slots=True)
class _Record:
    num_in_a_row: int = 0
    num_good: float = 0.0
    num_bad: float = 0.0
    counted_at: float = 0.0
    ejected_until: float | None = None
    last_until: float = 0.0
    ejection_s: float = 0.0
    trial_until: float | None = None


class Health:
    """One record for each URL."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self.num_ejections = 0

    def find_ejected(self) -> frozenset[str]:
        """Return the URLs that get no request now."""
        now = self._clock()
        return frozenset(url for url, record in self._records.items() if not _takes(record, now))

    def begin(self, url: str, within_s: float = TRIAL_S) -> None:
        """A request goes there; it is the trial where one is due, and has so long to be answered."""
        record, now = self._records.get(url), self._clock()
        if record is not None and record.ejected_until is not None and now >= record.ejected_until:
            record.trial_until = now + within_s

    def note_good(self, url: str) -> None:
        """The replica has begun to answer, or has refused with a good reason."""
        record = self._count(url)
        record.num_good += 1
        record.num_in_a_row = 0
        if record.trial_until is not None:
            record.ejected_until, record.trial_until = None, None
            record.num_good, record.num_bad = 0.0, 0.0

    def note_fault(self, url: str) -> None:
        """The replica has answered with an error of its own."""
        record = self._count(url)
        record.num_bad += 1
        record.num_in_a_row += 1
        num_all = record.num_good + record.num_bad
        is_often = num_all >= MIN_TO_JUDGE and record.num_bad / num_all >= MAX_FAILED_SHARE
        if record.trial_until is not None or is_often or record.num_in_a_row >= MAX_IN_A_ROW:
            self._eject(record)

    def note_broken(self, url: str) -> None:
        """The replica has taken no connection, or has broken one, or said nothing for too long."""
        record = self._count(url)
        record.num_bad += 1
        record.num_in_a_row += 1
        self._eject(record)

    def keep_only(self, urls: Iterable[str]) -> None:
        """Forget what is not among `urls`."""
        kept = set(urls)
        self._records = {url: record for url, record in self._records.items() if url in kept}

    def _eject(self, record: _Record) -> None:
        now = self._clock()
        if record.ejected_until is not None and now < record.ejected_until:
            # requests that were there already say the same again
            return
        is_calm = now - record.last_until > _CALM_S
        longer = min(LONGEST_EJECTION_S, 2 * record.ejection_s)
        record.ejection_s = FIRST_EJECTION_S if is_calm or not record.ejection_s else longer
        record.ejected_until = record.last_until = now + record.ejection_s
        record.trial_until = None
        self.num_ejections += 1

    def _count(self, url: str) -> _Record:
        now = self._clock()
        record = self._records.setdefault(url, _Record(counted_at=now))
        factor = math.pow(0.5, (now - record.counted_at) / HALF_LIFE_S)
        record.num_good, record.num_bad, record.counted_at = record.num_good * factor, record.num_bad * factor, now
        return record


def _takes(record: _Record, now: float) -> bool:
    if record.ejected_until is None:
        return True
    if now < record.ejected_until:
        return False
    return record.trial_until is None or now > record.trial_until
