"""How often a login may be tried: 5 times a minute from one address, and with one key id. Counts in this process.

Only failures count, so that a team behind one proxy does not lock itself out by working.
"""

from __future__ import annotations

import hashlib
import ipaddress
import time
from collections import deque
from collections.abc import Callable

MAX_TRIES = 5
WINDOW_S = 60.0
_MAX_SUBJECTS = 10_000
_KEY_ID_LEN = len("lpx_") + 10
_NETWORK_BITS = 64


class LoginLimit:
    """The failed tries of the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tries: dict[str, deque[float]] = {}

    def find_wait_s(self, address: str, key: str) -> int | None:
        """Return in how many seconds a login with this key may be tried from here, None for now."""
        now = self._clock()
        full = [
            tries for subject in _list_subjects(address, key) if len(tries := self._read(subject, now)) >= MAX_TRIES
        ]
        waits = [int(tries[-MAX_TRIES] + WINDOW_S - now) + 1 for tries in full]
        return max(waits, default=None)

    def note_failure(self, address: str, key: str) -> None:
        """Count a try that failed."""
        now = self._clock()
        if len(self._tries) >= _MAX_SUBJECTS:
            self._forget_old(now)
        for subject in _list_subjects(address, key):
            self._tries.setdefault(subject, deque(maxlen=MAX_TRIES)).append(now)

    def _read(self, subject: str, now: float) -> list[float]:
        return [at for at in self._tries.get(subject, ()) if now - at < WINDOW_S]

    def _forget_old(self, now: float) -> None:
        """Forget what is over; if all of it is of this minute, forget the older half."""
        self._tries = {subject: tries for subject, tries in self._tries.items() if now - tries[-1] < WINDOW_S}
        if len(self._tries) >= _MAX_SUBJECTS:
            self._tries = dict(list(self._tries.items())[_MAX_SUBJECTS // 2 :])


def _list_subjects(address: str, key: str) -> tuple[str, str]:
    """The network of an address, and the id of a key: nothing of its secret is kept."""
    return f"from {_find_network(address)}", f"key {hashlib.sha256(key[:_KEY_ID_LEN].encode()).hexdigest()}"


def _find_network(address: str) -> str:
    """An IPv6 host has a whole network of addresses to try from."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, _NETWORK_BITS), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)
