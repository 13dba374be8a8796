"""What the gate asks of whoever knows engines; the gateway gives it, a registry without engines has none."""

from __future__ import annotations

from typing import Protocol

from loraplex_registry.peft.parity import ParityResult
from loraplex_registry.wire.verdict import NoVerdictError

__all__ = ["NoEngines", "NoVerdictError", "ParityJudge"]


class ParityJudge(Protocol):
    """Measures content on a running engine."""

    def has_engine(self, base: str) -> bool:
        """Return whether an engine of that base serves now; from memory, at once."""

    async def measure(self, base: str, digest: str, rank: int, weights: str | None = None) -> ParityResult | None:
        """Let an engine of the base compare its answers with those of the merged weights; bounded in time.

        Args:
            base: Name of the base.
            digest: The content, which is in the store.
            rank: Of the adapter; an engine with a lower limit is not asked.
            weights: Digest of the base's weights that the engine must have; None: any that are served.

        Returns:
            What it found, None if no such engine of that base serves now.

        Raises:
            NoVerdictError: One was asked and could not say.
        """


class NoEngines:
    """The judge of a registry that knows no engines."""

    def has_engine(self, base: str) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    async def measure(
        self,
        base: str,  # noqa: ARG002
        digest: str,  # noqa: ARG002
        rank: int,  # noqa: ARG002
        weights: str | None = None,  # noqa: ARG002
    ) -> ParityResult | None:
        """Return None."""
        return None
