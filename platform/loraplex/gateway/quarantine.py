"""Turns failures of replicas into a fact of the platform: a version that no engine can load is quarantined, once.

`QuarantineWatch` looks at each view of the fleet; the registry is the only writer of versions.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from loraplex.errors import LoraplexError
from loraplex.fleet.view import FleetView, find_unloadable
from loraplex.gateway.metrics import GatewayMetrics
from loraplex.gateway.names import NameIndex

_MAX_MESSAGE_LEN = 300
_log = logging.getLogger(__name__)


class QuarantineWatch:
    """Acts on views of the fleet.

    Args:
        names: Says which versions are callable.
        quarantine: Takes a digest and the cause, quarantines its versions in one transaction and returns how many.
        metrics: Counts them.
    """

    def __init__(
        self, names: NameIndex, quarantine: Callable[[str, str], Awaitable[int]], metrics: GatewayMetrics
    ) -> None:
        self._names = names
        self._quarantine = quarantine
        self._metrics = metrics

    async def act(self, view: FleetView) -> None:
        """Quarantine what no engine can load; if the registry does not answer, the next view is another chance."""
        unloadable = find_unloadable(view)
        if unloadable:
            await self._names.ensure_fresh()
        for (base, digest), reason in unloadable.items():
            if not self._names.has_served(base, digest):
                continue
            try:
                num_versions = await self._quarantine(digest, _clean(reason))
            except LoraplexError as error:
                _log.warning("%s cannot be quarantined now: %s", digest, error.message)
                continue
            self._metrics.count_quarantines(num_versions)
            _log.warning("%d versions quarantined, no engine can load %s: %s", num_versions, digest, _clean(reason))


def _clean(reason: str) -> str:
    return "".join(char if char.isprintable() else " " for char in reason)[:_MAX_MESSAGE_LEN]
