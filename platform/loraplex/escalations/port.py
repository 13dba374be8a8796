"""What escalations need of others: acts on versions and aliases, and what is known of pools."""

from __future__ import annotations

from typing import Protocol

from loraplex_registry.wire.adapter import VersionView
from loraplex_registry.wire.full import Measured, Replaced
from loraplex_registry.wire.identity import Identity


class Models(Protocol):
    """What is done to versions and aliases; the target tenant of `by` has the adapter. All may be repeated."""

    async def measure_saturation(self, by: Identity, adapter: str, number: int | None) -> Measured:
        """Say how much of its rank a stored LoRA uses."""

    async def register_full(self, by: Identity, adapter: str, escalation: str, pool: str, digest: str) -> VersionView:
        """Give the adapter a version that a pool serves."""

    async def activate_full(self, by: Identity, adapter: str, escalation: str) -> tuple[VersionView, Replaced]:
        """Point the adapter's name to that version."""

    async def revert_full(self, by: Identity, adapter: str, escalation: str) -> None:
        """Point it back to what it meant before."""

    async def withdraw_full(self, by: Identity, adapter: str, escalation: str) -> None:
        """Point it back and retire that version."""


class Pools(Protocol):
    """What is known of the pools that serve full models."""

    def check_pool(self, name: str) -> None:
        """Return if an operator has configured this pool for a full model.

        Raises:
            InvalidRequestError: None has.
        """

    async def wait_ready(self, name: str, digest: str, timeout_s: float) -> None:
        """Return once a replica of the pool serves the model of this digest.

        Raises:
            NoReplicaError: None does by then; the message says what they say.
        """
