"""The end of a gateway process: from `begin` on nothing new is taken, from `expire` on nothing goes on."""

from __future__ import annotations

import asyncio

from loraplex.errors import DrainingError


class Drain:
    """Two moments that requests watch."""

    def __init__(self) -> None:
        self._has_begun = asyncio.Event()
        self._has_expired = asyncio.Event()

    def begin(self) -> None:
        """Refuse new generations from now on."""
        self._has_begun.set()

    def expire(self) -> None:
        """End the generations that still run."""
        self._has_expired.set()

    @property
    def has_begun(self) -> bool:
        """Whether new generations are refused."""
        return self._has_begun.is_set()

    def check_open(self) -> None:
        """Refuse a new generation once draining has begun.

        Raises:
            DrainingError: It has.
        """
        if self.has_begun:
            raise DrainingError

    async def wait_expired(self) -> None:
        """Return when running generations must end."""
        await self._has_expired.wait()
