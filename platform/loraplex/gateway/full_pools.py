"""Pools that serve full models, as escalations see them: which an operator has configured, and which are ready."""

from __future__ import annotations

import asyncio
import time

from loraplex.errors import InvalidRequestError, NoReplicaError
from loraplex.fleet.fleet import Fleet
from loraplex.gateway.names import NameIndex

_LOOK_EVERY_S = 0.2
_SERVED = ("ready", "quarantined")


class FullPools:
    """Over the pools and the view of the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def check_pool(self, name: str) -> None:
        """Return if an operator has configured this pool for a full model.

        Raises:
            InvalidRequestError: None has.
        """
        names = sorted(pool.name for pool in self._fleet.pools if pool.model is not None)
        if name in names:
            return
        known = f"there are {', '.join(names)}" if names else "there is none yet"
        raise InvalidRequestError(
            f"pool is a name that LORAPLEX_POOLS gives to engines of a full model; {known}", param="pool"
        )

    async def wait_ready(self, name: str, digest: str, timeout_s: float) -> None:
        """Return once a replica of the pool serves the model of this digest.

        Raises:
            NoReplicaError: None does after `timeout_s` seconds; the message says what they say.
        """
        until = time.monotonic() + timeout_s
        while self._fleet.choose_full(name, digest) is None:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise NoReplicaError(f"No engine of the pool {name} serves this model: {self._explain(name, digest)}")
            await asyncio.sleep(min(_LOOK_EVERY_S, left_s))

    def _explain(self, name: str, digest: str) -> str:
        found = []
        for replica in self._fleet.view.replicas:
            if replica.pool == name:
                other = (
                    f"it serves {replica.model_digest or 'files of which it does not tell the digest'}, not {digest}"
                )
                found.append(f"{replica.name}: {replica.problem or other}")
        return "; ".join(found) or "the pool has no engines"


def is_registered(names: NameIndex, adapter_id: str, number: int | None) -> bool:
    """Whether an adapter is there, and, where a number is given, its version is served."""
    adapter = names.find_adapter_by_id(adapter_id)
    if adapter is None or number is None:
        return adapter is not None
    return any(version.number == number and version.state in _SERVED for version in adapter.versions)
