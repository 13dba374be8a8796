"""Sends stored files byte for byte, read in a thread, a piece at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import BinaryIO

from litestar.response import Stream

from loraplex_registry.storage.store import ObjectStore
from loraplex_registry.wire.adapter import ManifestFile

_PIECE_BYTES = 1 << 20


async def send_file(store: ObjectStore, digest: str, place: str, file: ManifestFile) -> Stream:
    """Return the answer that streams one file of an artifact; it is open before the headers go out.

    Raises:
        ArtifactMissingError: It is not in the store.
        StoreUnavailableError: The store cannot be read.
    """
    opened = await asyncio.to_thread(store.open, digest, place)
    headers = {
        "Content-Length": str(file.size),
        "Content-Disposition": f'attachment; filename="{file.name}"',
        "ETag": f'"{file.sha256}"',
        "X-Content-Type-Options": "nosniff",
    }
    return Stream(_read(opened), headers=headers, media_type="application/octet-stream")


async def _read(opened: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while piece := await asyncio.to_thread(opened.read, _PIECE_BYTES):
            yield piece
    finally:
        opened.close()
