"""Removes what uploads leave: objects without rows, old staging, uploads in parts that are over, expired keys.

An object goes only under the lock on names, while nobody can publish it, and only once it is old enough that no
upload is on its way to its row. Parts go once their upload is complete, given up or expired, or has no row.
"""

from __future__ import annotations

import asyncio
import logging

import sqlalchemy as sa

from loraplex_registry.db.database import Change, Database
from loraplex_registry.db.model import VersionRow
from loraplex_registry.errors import RegistryError
from loraplex_registry.settings import RegistrySettings
from loraplex_registry.storage.store import Store
from loraplex_registry.uploads.idempotency import IdempotencyKeys
from loraplex_registry.uploads.upload_row import UploadRows

_log = logging.getLogger(__name__)


class Sweeper:
    """Sweeps now and then until cancelled."""

    def __init__(self, database: Database, store: Store, settings: RegistrySettings) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._keys = IdempotencyKeys(database)
        self._uploads = UploadRows(database)

    async def run(self) -> None:
        """Sweep for ever; a sweep that fails is logged and the next one tries again."""
        while True:
            try:
                await self.sweep()
            except (RegistryError, OSError):
                _log.exception("the sweep of the object store failed")
            await asyncio.sleep(self._settings.sweep_interval_s)

    async def sweep(self) -> list[str]:
        """Sweep once and return the digests of removed objects."""
        grace_s = self._settings.orphan_grace_s
        await self._keys.sweep()
        await self._sweep_parts(grace_s)
        listed = await asyncio.to_thread(lambda: list(self._store.list_artifacts()))
        orphans = await self._without_rows([digest for digest, age_s in listed if age_s > grace_s])
        removed = [digest for digest in orphans if await self._remove(digest)]
        # frees the bytes of what was removed, too, now that nobody waits for the lock
        await asyncio.to_thread(self._store.sweep_staging, grace_s)
        return removed

    async def _sweep_parts(self, grace_s: float) -> None:
        await self._uploads.delete_expired()
        listed = await asyncio.to_thread(lambda: list(self._store.list_uploads()))
        states = await self._uploads.list_states([upload for upload, _ in listed])
        for upload, age_s in listed:
            state = states.get(upload)
            if state in ("completed", "aborted") or (state is None and age_s > grace_s):
                await asyncio.to_thread(self._store.drop, upload)

    async def _without_rows(self, digests: list[str]) -> list[str]:
        async with self._database.read() as session:
            kept = set((await session.execute(_kept_digests())).scalars())
        return [digest for digest in digests if digest not in kept]

    async def _remove(self, digest: str) -> bool:
        async def work(change: Change) -> bool:
            kept = await change.session.execute(_kept_digests().where(VersionRow.digest == digest).limit(1))
            age_s = await asyncio.to_thread(self._store.find_age_s, digest)
            if kept.first() is not None or age_s is None or age_s <= self._settings.orphan_grace_s:
                return False
            await asyncio.to_thread(self._store.delete, digest)
            return True

        return await self._database.change(work)


def _kept_digests() -> sa.Select[str]:
    return sa.select(VersionRow.digest).where(VersionRow.state != "purged").distinct()
