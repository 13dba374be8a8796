"""Lets an engine measure a new version before anybody may call it: the registry's judge, over the fleet."""

from __future__ import annotations

import msgspec

from loraplex.fleet.fleet import Fleet
from loraplex_engine.wire.client import EngineRefusedError, ReplicaFailedError, UnreachableError
from loraplex_registry.peft.parity import ParityResult
from loraplex_registry.wire.verdict import NoVerdictError

_CONTENT_CODES = frozenset({"digest_mismatch", "adapter_quarantined"})


class FleetJudge:
    """Asks the engine that would serve the version."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def has_engine(self, base: str) -> bool:
        """Return whether an engine of that base serves now, as it was last seen."""
        return self._fleet.serves(base)

    async def measure(self, base: str, digest: str, rank: int, weights: str | None = None) -> ParityResult | None:
        """Return what an engine measured, None if none serves this base and rank, with these weights if there are any.

        Raises:
            NoVerdictError: The engine could not say.
        """
        replica = self._fleet.choose(base, digest, rank, weights=weights)
        if replica is None:
            return None
        try:
            measured = await self._fleet.client(replica.url).measure_parity(digest)
        except EngineRefusedError as error:
            raise NoVerdictError(f"{error.code}: {error}", is_content=error.code in _CONTENT_CODES) from error
        except (UnreachableError, ReplicaFailedError) as error:
            self._fleet.health.note_broken(replica.url)
            raise NoVerdictError(f"{replica.name} does not answer") from error
        except msgspec.DecodeError as error:
            raise NoVerdictError(f"{replica.name} answers something else") from error
        self._fleet.health.note_good(replica.url)
        return measured
